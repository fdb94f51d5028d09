"""Tests of `shardformer/distributed`."""
