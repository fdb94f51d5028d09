"""StateMemory: where a rank keeps what its optimizer updates: states, master weights and reduced gradients."""

from __future__ import annotations

import torch
from torch import Tensor


class StateMemory:
    """Memory of the device: nothing is offloaded.

    Attributes:
        is_offloaded: whether tensors are anywhere else. The optimizer then steps one bucket at a time.
    """

    is_offloaded = False

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized memory of shape [count] for values of a rank on `device`."""
        return torch.empty(count, dtype=dtype, device=device)

    def release(self, tensor: Tensor) -> None:
        """Release memory from `empty` that is not used any more."""

    def read_ahead(self, tensor: Tensor) -> None:
        """Start to bring values from `empty` near, because they are used soon."""

    def page_out(self, tensor: Tensor) -> None:
        """Let values from `empty` go until they are used again; other tensors stay as they are."""
