"""One step: a pass through the model, what surrounds it, and the loops that run it."""
