"""Tests of `plugins/hybrid_parallel/loss`."""
