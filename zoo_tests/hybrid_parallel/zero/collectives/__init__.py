"""Tests of `plugins/hybrid_parallel/zero/collectives`."""
