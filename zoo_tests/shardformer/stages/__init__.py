"""Tests of `shardformer/stages`."""
