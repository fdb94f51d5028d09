"""Tests of `shardformer/utils`."""
