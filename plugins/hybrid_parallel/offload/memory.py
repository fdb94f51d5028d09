"""Memory of what is offloaded: optimizer states, master weights, reduced gradients, and shards of parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.hybrid_parallel.offload.paged_file import PagedFile
from plugins.hybrid_parallel.zero.comm.shared_memory import SharedSegment
from plugins.hybrid_parallel.zero.state_memory import StateMemory


class FileMemory(StateMemory):
    """Memory in the file of a rank.

    Args:
        file: the file.
    """

    is_offloaded = True

    def __init__(self, file: PagedFile) -> None:
        self.file = file

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros of shape [count] in the file, on the CPU."""
        return self.file.empty(count, dtype)

    def release(self, tensor: Tensor) -> None:
        """Give the space of a tensor back."""
        self.file.release(tensor)

    def read_ahead(self, tensor: Tensor) -> None:
        """Start to read a tensor."""
        self.file.read_ahead(tensor)

    def page_out(self, tensor: Tensor) -> None:
        """Give up the pages of a tensor."""
        self.file.page_out(tensor)


class HostMemory(StateMemory):
    """Page-locked memory of the host, of a rank on a GPU."""

    is_offloaded = True

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized memory of shape [count] on the CPU."""
        return torch.empty(count, dtype=dtype, pin_memory=True)


class HostSegment(SharedSegment):
    """Page-locked memory for shards of parameters, of a rank on a GPU; other ranks do not read it."""

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate [count] values."""
        return torch.empty(count, dtype=dtype, pin_memory=True)
