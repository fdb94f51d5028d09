"""Models as Hugging Face directories."""
