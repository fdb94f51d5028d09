"""Tests for the day a GPU is at hand, and `python -m zoo_tests.gpu`, which writes a page about that GPU."""
