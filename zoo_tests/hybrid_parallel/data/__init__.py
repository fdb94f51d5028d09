"""Tests of `plugins/hybrid_parallel/data`."""
