"""Tests of `plugins/hybrid_parallel/distributed`."""
