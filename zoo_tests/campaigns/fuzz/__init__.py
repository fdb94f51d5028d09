"""Random training scripts, each played by plain transformers and torch and by this library."""
