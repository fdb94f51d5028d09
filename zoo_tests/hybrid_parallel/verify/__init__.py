"""Tests of `plugins/hybrid_parallel/verify`."""
