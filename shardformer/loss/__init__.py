"""Losses of model heads, expressed as sums and counts."""
