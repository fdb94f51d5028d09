"""Tests of `shardformer`."""
