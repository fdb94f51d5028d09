"""Sequence parallelism on the tensor-parallel axis: split-gather, and Ulysses' exchange of heads."""
