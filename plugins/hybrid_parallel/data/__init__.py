"""Data loading: data-parallel shares, random streams, micro-batches, and checks of the batches across ranks."""
