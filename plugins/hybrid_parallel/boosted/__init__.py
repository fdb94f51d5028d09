"""The model that `boost` returns, and the checks on how other code uses it."""
