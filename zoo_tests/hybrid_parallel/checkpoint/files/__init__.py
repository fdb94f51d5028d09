"""Tests of `plugins/hybrid_parallel/checkpoint/files`."""
