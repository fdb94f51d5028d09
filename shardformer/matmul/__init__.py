"""Matrix products of linear layers: native or 8 bit, and where their weight gradients go."""
