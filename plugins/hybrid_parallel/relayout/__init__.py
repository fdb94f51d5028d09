"""Change of a running job's layout: its state moves between ranks, without files."""
