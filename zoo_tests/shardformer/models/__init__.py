"""Tests of `shardformer/models`."""
