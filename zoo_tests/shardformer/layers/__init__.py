"""Tests of `shardformer/layers`."""
