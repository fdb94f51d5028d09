"""Values that buckets take over: those that parameters have, or that arrive when each parameter is sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Source = Callable[[], Tensor]  # returns the values of a parameter, in the precision that an optimizer needs


def take_source(param: nn.Parameter, initial: dict[nn.Parameter, Source]) -> Source:
    """Remove the source of a parameter's values and return it; without one, that of the values that it has."""
    values = param.data
    return initial.pop(param, lambda: values)


def hollow(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor whose storage has no bytes yet."""
    made = torch.empty(*shape, dtype=dtype, device=device)
    made.untyped_storage().resize_(0)
    return made
