"""`torch.autocast` around layers that multiply in autograd functions of their own, which it does not reach."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """What the operators on autocast's list make of their inputs: its precision where it is on, fp64 left as it is.

    The conversions are part of the graph. `tensors` are all on the device of the first.
    """
    dtype = autocast_dtype(tensors[0].device)
    if dtype is None:
        return tensors
    return tuple(each.to(dtype) if each is not None and _is_eligible(each) else each for each in tensors)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The precision of autocast on a device; None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _is_eligible(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64
