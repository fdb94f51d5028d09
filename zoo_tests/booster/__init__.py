"""Tests of `booster`."""
