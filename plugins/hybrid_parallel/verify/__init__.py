"""Train a tiny model of the same class sharded and unsharded, and find the first place where the two runs differ."""
