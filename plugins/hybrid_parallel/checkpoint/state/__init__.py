"""Training states: tensors of the whole model in chunks that any layout reads."""
