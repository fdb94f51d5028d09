"""Values that buckets take over: those that parameters have, or that arrive when each parameter is sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Source = Callable[[], Tensor]  # returns the values of a parameter, in the precision that an optimizer needs


def take_source(param: nn.Parameter, initial: dict[nn.Parameter, Source]) -> Source:
    """Remove the source of a parameter's values and return it; without one, that of the values that it has."""
    values = param.data
    return initial.pop(param, lambda: values)


def without_values(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of one element in memory, repeated: nan, so that code that reads it too early is noticed."""
    return torch.full((1,), math.nan, dtype=dtype, device=device).expand(*shape)
