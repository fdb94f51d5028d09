"""Benchmarks, reported as ratios within one run. `python -m benchmarks` runs them all and writes the tables."""
