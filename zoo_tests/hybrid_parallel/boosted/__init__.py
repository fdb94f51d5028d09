"""Tests of `plugins/hybrid_parallel/boosted`."""
