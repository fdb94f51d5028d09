"""Interface of ATorch's `auto_accelerate`: training objects for a given layout or for the fastest one found."""
