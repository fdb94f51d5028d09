"""Tests of `shardformer/loss`."""
