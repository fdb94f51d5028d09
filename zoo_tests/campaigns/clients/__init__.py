"""Public scripts, not a line of them changed: plain, and under `booster run --layout`."""
