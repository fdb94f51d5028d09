"""Tests of `shardformer/sequence_parallel`."""
