"""Tests of `plugins/hybrid_parallel/compat`."""
