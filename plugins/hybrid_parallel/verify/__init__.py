"""Train a small twin of a model sharded and unsharded, and find the first place where the two runs differ."""
