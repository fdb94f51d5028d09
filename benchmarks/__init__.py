"""What is measured, as ratios within one run. `python -m benchmarks` runs everything and writes the tables."""
