"""Tests of `booster/profiling`."""
