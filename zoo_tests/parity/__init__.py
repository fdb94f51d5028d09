"""Sharded training against plain single-process training."""
