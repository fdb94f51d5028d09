"""Sharding policies: one short table per model family. Nothing in this package imports transformers."""
