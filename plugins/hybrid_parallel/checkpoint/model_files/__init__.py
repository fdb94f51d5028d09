"""Saving and loading models as Hugging Face directories."""
