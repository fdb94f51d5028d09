"""Single steps of the plugin against plain torch: optimizers, losses, precision, checkpoints, errors."""
