"""Tests of `booster/cli`."""
