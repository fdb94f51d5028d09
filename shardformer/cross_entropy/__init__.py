"""Cross-entropy over logits that are sharded along the vocabulary, or never made at once."""
