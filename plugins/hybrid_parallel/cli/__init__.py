"""Commands of `booster` that know this plugin."""
