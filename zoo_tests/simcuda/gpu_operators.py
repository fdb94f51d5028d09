"""Operators that torch has for GPUs alone, computed on the memory of the simulated device."""

from __future__ import annotations

import torch
from torch import Tensor


def install(library: torch.library.Library) -> None:
    """Give the CPU, whose kernels the device runs, what only GPUs have; `library` extends `aten`."""
    library.impl("addmm.dtype_out", _add_product, "CPU")


def _add_product(
    self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    """Add a product of 16 bit to a tensor of 32; sums are in fp32, as in the products of a GPU."""
    product = mat1.to(out_dtype) @ mat2.to(out_dtype)
    return out.copy_(alpha * product + (beta * self if beta else 0))
