"""Hand-written policies of model families, one file per family or group of related families."""
