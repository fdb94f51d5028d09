"""Tests of `booster/failure`."""
