"""Tests of `plugins/hybrid_parallel/cli`."""
