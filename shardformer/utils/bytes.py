"""The memory of tensors as bytes, for messages and files."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(x: Tensor) -> Tensor:
    """Return [..., size] as uint8, [..., size * itemsize]: a view where the values are dense in memory, or else a copy.

    torch counts a dim of one element as contiguous whatever its stride is, but takes no such tensor as bytes: a column
    of a batch of one row.
    """
    dense = x.contiguous()
    if dense.stride(-1) != 1:
        dense = dense.clone(memory_format=torch.contiguous_format)
    return dense.view(torch.uint8)
