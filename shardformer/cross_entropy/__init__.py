"""Cross-entropy over logits that are sharded along the vocabulary, or computed in chunks."""
