"""Models that transformers does not have. Nothing here is imported unless it is asked for."""
