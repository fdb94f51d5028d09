"""ATorch's names for process groups and random streams."""
