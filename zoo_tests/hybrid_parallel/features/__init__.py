"""Tests of `plugins/hybrid_parallel/features`."""
