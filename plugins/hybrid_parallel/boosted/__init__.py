"""The model that `boost` returns, and how other code may use it."""
