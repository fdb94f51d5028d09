"""Tests of `shardformer/context_parallel`."""
