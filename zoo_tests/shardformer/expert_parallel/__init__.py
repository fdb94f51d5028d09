"""Tests of `shardformer/expert_parallel`."""
