"""Saving and loading: models as Hugging Face directories, training state as logical per-parameter tensors."""
