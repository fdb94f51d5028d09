"""Tests of `plugins/hybrid_parallel/setup`."""
