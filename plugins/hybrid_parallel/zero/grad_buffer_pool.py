"""GradBufferPool: the buffers in which gradients are accumulated."""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.hybrid_parallel.zero.comm.collectives import ZeroCollectives


class GradBufferPool:
    """Memory of buckets whose gradients were reduced, for buckets whose gradients are still to come.

    Fresh memory of a CPU costs as much time as a copy: its pages are filled with zeros. A GPU's has torch's own cache.

    Args:
        exchange: what the buffers go through.
        unit: least number of bytes of a buffer, so that buckets of about one size can take each other's.
    """

    def __init__(self, exchange: ZeroCollectives, unit: int = 0) -> None:
        self._exchange, self._unit = exchange, unit
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}  # address -> the whole buffer

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[size], with any values."""
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
        """Take back what `take` gave."""
        if flat.device.type == "cpu":
            self._free.append(self._taken.pop(flat.data_ptr()))

    def leave(self, flat: Tensor) -> None:
        """Leave what `take` gave to those who still read it."""
        self._taken.pop(flat.data_ptr(), None)

    def trim(self, count: int) -> None:
        """Keep the largest `count` buffers of those that are not in use."""
        self._free.sort(key=Tensor.numel, reverse=True)
        for buffer in self._free[count:]:
            self._exchange.release(buffer)
        del self._free[count:]
