"""GradBufferPool: reuses the buffers in which gradients are accumulated."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Allocator(Protocol):
    """What memory of buffers comes from."""

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized memory of shape [count]."""

    def release(self, tensor: Tensor) -> None:
        """Release memory from `empty` that is not used any more."""


class FreshBuffers:
    """The interface of a pool for buffers that are not reused."""

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized buffer of shape [size]."""
        return torch.empty(size, dtype=dtype, device=device)

    def give(self, flat: Tensor) -> None:
        """Give up a buffer from `take`."""

    leave = give


class GradBufferPool:
    """Pool of gradient buffers: buckets that are already reduced pass their memory on to later buckets.

    On a CPU, fresh memory costs as much time as a copy, because the system fills its pages with zeros. On a GPU, the
    pool is not used: torch has its own cache.

    Args:
        exchange: what allocates buffers: the collectives that they are used with, or a `StateMemory`.
        unit: minimum size of a buffer in bytes, so that buckets of about one size can share buffers.
    """

    def __init__(self, exchange: Allocator, unit: int = 0) -> None:
        self._exchange, self._unit = exchange, unit
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}  # address -> the whole buffer

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Take an uninitialized buffer of shape [size]."""
        if device.type != "cpu":
            return self._exchange.empty(size, dtype, device)
        fits = [buffer for buffer in self._free if buffer.dtype == dtype and buffer.numel() >= size]
        if fits:
            whole = min(fits, key=Tensor.numel)
            self._free = [buffer for buffer in self._free if buffer is not whole]
        else:
            whole = self._exchange.empty(max(size, self._unit // dtype.itemsize), dtype, device)
        self._taken[whole.data_ptr()] = whole
        return whole[:size]

    def give(self, flat: Tensor) -> None:
        """Put a buffer from `take` back into the pool."""
        if flat.device.type == "cpu":
            self._free.append(self._taken.pop(flat.data_ptr()))

    def leave(self, flat: Tensor) -> None:
        """Give up a buffer from `take` that other code still reads."""
        self._taken.pop(flat.data_ptr(), None)

    def trim(self, count: int) -> None:
        """Release all free buffers except the largest `count`."""
        self._free.sort(key=Tensor.numel, reverse=True)
        for buffer in self._free[count:]:
            self._exchange.release(buffer)
        del self._free[count:]
