"""Tests of `shardformer/matmul`."""
