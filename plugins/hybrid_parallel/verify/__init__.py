"""A small twin of a model, trained sharded and unsharded, and the first place where the two differ."""
