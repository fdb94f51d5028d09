"""Faults and interruptions, many times over: commands that write tables, of which the suite runs a few rounds."""
