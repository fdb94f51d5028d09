"""Expert parallelism: which rank holds which experts, and how tokens reach them."""
