"""Tests of the shape of the code: imports, sizes, and what is safe to load."""
