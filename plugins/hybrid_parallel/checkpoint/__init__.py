"""Saving and loading: Hugging Face directories for models, logical per-parameter tensors for training state."""
