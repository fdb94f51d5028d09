"""Commands of `booster` that this plugin provides."""
