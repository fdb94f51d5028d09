"""Tests of `shardformer/compat`."""
