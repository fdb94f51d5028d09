"""`reproducible=True`: the same bits under every layout, by units of samples, exact sums and seeds by position."""
