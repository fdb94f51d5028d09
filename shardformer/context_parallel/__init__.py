"""Context parallelism: every rank holds a shard of each sequence throughout the model."""
