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
# A square, or a lower power, is split into multiples of 2**-4, 2**-34 and 2**-64: each part has at most 31 bits, so
# that 2**32 of them add up in int64. What a sum has beyond 30 bits is carried to the part before, so that it adds up
# with those of all other parameters and ranks.
_FIRST_BITS, _PART_BITS, NUM_PARTS = 4, 30, 3
_CHUNK = 1 << 16  # elements that a CPU converts at once: their intermediate values stay in its cache


def largest(values: Tensor) -> Tensor:
    """Return the largest absolute value (0-d); nan if one is nan."""
    if not values.numel():
        return values.new_zeros(())
    least, most = values.aminmax()  # on a CPU much faster than a norm
    return torch.maximum(-least, most)


def add_multiples(sums: Tensor, values: Tensor, begin: bool) -> float:
    """Add floating-point values, rounded towards zero to multiples of the grid, to `sums`; for |values| < `LIMIT`.

    Args:
        sums: multiples of the same shape, contiguous int64.
        begin: `sums` has no content yet, and is overwritten.

    Returns:
        The largest absolute value; nan if one is nan.
    """
    bound, size = 0.0, _chunk_of(values)
    for total, part in zip(sums.view(-1).split(size), values.reshape(-1).split(size), strict=True):
        most = largest(part).item()
        bound = most if most != most else max(bound, most)
        if not most:  # most rows of an embedding
            if begin:
                total.zero_()
            continue
        multiples = part.mul(_STEPS).to(torch.int64)  # the product is exact: it only changes exponents
        if begin:
            total.copy_(multiples)
        else:
            total.add_(multiples)
    return bound


def from_multiples(multiples: Tensor, dtype: torch.dtype) -> Tensor:
    """Return int64 multiples of the grid, [n], as floating-point values."""
    values = multiples.new_empty(multiples.shape, dtype=dtype)
    size = _chunk_of(values)
    for part, into in zip(multiples.split(size), values.split(size), strict=True):
        into.copy_(part.to(torch.float64).mul_(1.0 / _STEPS))
    return values


def power_parts(values: Tensor, exponent: float) -> Tensor:
    """Return the sum of powers of |fp32 `values`|, [n], in parts, [3] int64; parts add up exactly over tensors.

    Args:
        exponent: at most 2.
    """
    zero = torch.zeros(NUM_PARTS, dtype=torch.int64, device=values.device)
    parts = sum((_power_parts(part, exponent) for part in values.split(_chunk_of(values))), zero)
    for place in range(NUM_PARTS - 1, 0, -1):
        parts[place - 1] += parts[place] >> _PART_BITS
        parts[place] &= (1 << _PART_BITS) - 1
    return parts


def _chunk_of(values: Tensor) -> int:
    """Return how many elements to convert at once."""
    return _CHUNK if values.device.type == "cpu" else max(1, values.numel())


def _power_parts(values: Tensor, exponent: float) -> Tensor:
    rest = values.to(torch.float64).abs_().pow_(exponent).mul_(2.0**_FIRST_BITS)
    parts = []
    for _ in range(NUM_PARTS):
        whole = rest.floor()
        parts.append(whole.to(torch.int64).sum())
        rest.sub_(whole).mul_(2.0**_PART_BITS)
    return torch.stack(parts)


def norm_of_parts(parts: Iterable[int], exponent: float) -> float:
    """Return the root of a sum of powers from its three parts."""
    total = 0
    for part in parts:
        total = (total << _PART_BITS) + part
    whole = math.ldexp(total, -_FIRST_BITS - _PART_BITS * (NUM_PARTS - 1))
    return math.sqrt(whole) if exponent == 2.0 else whole ** (1.0 / exponent)
