"""Training states: chunks of whole-model tensors, which any layout can read."""
