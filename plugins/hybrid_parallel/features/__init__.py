"""Features: what options and kinds of models add to the core, which knows none of them by name."""
