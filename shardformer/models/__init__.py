"""Models that transformers does not have. They are imported on demand only."""
