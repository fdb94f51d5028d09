"""Tests of `shardformer/policies`."""
