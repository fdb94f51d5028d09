"""Tests of `shardformer/cross_entropy`."""
