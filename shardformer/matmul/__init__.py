"""Matrix products of linear layers: native or FP8 backends, and storage of weight gradients."""
