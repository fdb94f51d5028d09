"""Tests of `plugins/hybrid_parallel/inspect`."""
