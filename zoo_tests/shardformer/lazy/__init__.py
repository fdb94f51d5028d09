"""Tests of `shardformer/lazy`."""
