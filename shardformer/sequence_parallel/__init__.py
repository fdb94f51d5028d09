"""Sequence parallelism on the tensor-parallel axis: split-gather, and the all-to-all of Ulysses."""
