"""Checkpoints under fire: ranks that are killed inside of a save, damaged files, disks that fail."""
