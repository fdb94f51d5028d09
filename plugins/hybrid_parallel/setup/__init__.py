"""Steps of `boost`: from a user's objects to sharded ones."""
