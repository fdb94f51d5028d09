"""Plans for families without a plan in transformers."""
