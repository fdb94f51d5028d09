"""Predict the memory and time of parallel layouts without running them, and rank them."""
