"""The losses of heads as sums and counts."""
