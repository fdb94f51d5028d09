"""Sums of gradients that are the same bits in any order.

Floating-point addition rounds, so that a sum depends on who adds what first. Here each summand is first rounded to a
multiple of a fixed grid (pre-rounding: Demmel and Nguyen, "Fast reproducible floating-point summation", 2013; Ahrens,
Demmel and Nguyen, "Algorithms for efficient reproducible floating point summation", 2020). The multiples are added as
int64, which is exact in any order; the sum is rounded to floating point once, when it is complete.

An fp32 value of 2**-26 (1.5e-8) or more is a multiple of the grid already. Smaller ones lose what is below 2**-50
(8.9e-16), far below the `eps` that an optimizer adds. The absolute values of all summands of an element must add up to
less than `LIMIT`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_STEPS = 2.0**50  # multiples of the grid in 1
LIMIT = 2.0**13  # 2**63 / _STEPS
# A square is split into multiples of 2**-4, 2**-34 and 2**-64: each part has at most 31 bits, so that 2**32 of them
# add up in int64.
_FIRST_BITS, _PART_BITS, NUM_PARTS = 4, 30, 3


def largest(values: Tensor) -> Tensor:
    """Return the largest absolute value (0-d); nan if one is nan."""
    if not values.numel():
        return values.new_zeros(())
    least, most = values.aminmax()  # on a CPU much faster than a norm
    return torch.maximum(-least, most)


def to_multiples(values: Tensor) -> Tensor:
    """Return floating-point values as int64 multiples of the grid, rounded towards zero; for |values| < `LIMIT`."""
    return values.mul(_STEPS).to(torch.int64)  # the product is exact: it only changes exponents


def from_multiples(multiples: Tensor, dtype: torch.dtype) -> Tensor:
    """Return int64 multiples of the grid as floating-point values."""
    return multiples.to(torch.float64).mul_(1.0 / _STEPS).to(dtype)


def square_parts(values: Tensor) -> Tensor:
    """Return the sum of squares of fp32 `values` in parts, [3] int64, which add up exactly over tensors and ranks."""
    rest = values.to(torch.float64).square_().mul_(2.0**_FIRST_BITS)
    parts = []
    for _ in range(NUM_PARTS):
        whole = rest.floor()
        parts.append(whole.to(torch.int64).sum())
        rest.sub_(whole).mul_(2.0**_PART_BITS)
    return torch.stack(parts)


def norm_of_parts(parts: Iterable[int]) -> float:
    """Return the square root of a sum of squares from its three parts."""
    total = 0
    for part in parts:
        total = (total << _PART_BITS) + part
    exponent = _FIRST_BITS + _PART_BITS * (NUM_PARTS - 1)
    return math.sqrt(math.ldexp(total, -exponent))
