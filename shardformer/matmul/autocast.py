"""`torch.autocast` for layers that multiply inside autograd functions, where autocast has no effect."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast tensors as the operators on autocast's list cast their inputs; fp64 and disabled autocast change nothing.

    The casts are part of the autograd graph. All `tensors` are on the device of the first.
    """
    dtype = autocast_dtype(tensors[0].device)
    if dtype is None:
        return tensors
    return tuple(each.to(dtype) if each is not None and _is_eligible(each) else each for each in tensors)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast on a device; None if it is disabled."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _is_eligible(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64
