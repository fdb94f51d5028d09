"""Snapshots of the training state in the memory of machines, and layouts for the ranks that are left."""
