"""Tests of `plugins/hybrid_parallel/checkpoint/model_files`."""
