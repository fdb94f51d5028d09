"""Tests of `shardformer/attention`."""
