"""Campaign: `reproducible=True` trains to the same bits under every layout."""
