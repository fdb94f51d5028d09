"""Tests of `shardformer/peft`."""
