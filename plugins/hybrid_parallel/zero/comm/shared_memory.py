"""Memory of the ranks of one machine that they read from each other.

A rank's memory is one anonymous file (`memfd_create`): it has no name that could collide, no limit of /dev/shm, and
needs no cleanup after a rank was killed, because it is gone with the last process that has it open. Other ranks open it
through /proc and map the parts that they read while they read them.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref

import torch
from torch import Tensor

_PAGE = mmap.ALLOCATIONGRANULARITY
# Address space is reserved in pieces of at least this many bytes; pages are allocated when they are written.
_EXTENT = 2**28
_MOST_KEPT = 8  # windows kept per neighbour


class SharedSegment:
    """This rank's memory that other ranks can read. It starts with a unique number, the token.

    Args:
        file: descriptor of the file that it is in; None for memory alone.
    """

    def __init__(self, file: int | None = None) -> None:
        self.file = os.memfd_create("booster", os.MFD_CLOEXEC) if file is None else file
        weakref.finalize(self, os.close, self.file)
        self._extent: mmap.mmap | None = None
        self._extent_start = self._extent_used = 0
        self._places: dict[int, tuple[mmap.mmap, int, int]] = {}  # address -> its extent, offsets in extent and file
        self.token = secrets.randbits(62)
        self.empty(1, torch.int64).fill_(self.token)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate [count] zeros at the start of a page."""
        size = max(1, -(-count * dtype.itemsize // _PAGE)) * _PAGE
        if self._extent is None or self._extent_used + size > len(self._extent):
            self._grow(max(size, _EXTENT))
        start, self._extent_used = self._extent_used, self._extent_used + size
        tensor = torch.frombuffer(self._extent, dtype=dtype, count=count, offset=start)
        self._places[tensor.data_ptr()] = (self._extent, start, self._extent_start + start)
        return tensor

    def place(self, tensor: Tensor) -> int:
        """Return the offset of a tensor from `empty` in the file, in bytes."""
        return self._places[tensor.data_ptr()][2]

    def release(self, tensor: Tensor) -> None:
        """Give the pages of a tensor from `empty` back to the system; its values are lost."""
        extent, start, _ = self._places.pop(tensor.data_ptr())
        size = -(-tensor.numel() * tensor.element_size() // _PAGE) * _PAGE
        extent.madvise(mmap.MADV_REMOVE, start, size)

    def read_ahead(self, tensor: Tensor) -> None:
        """Start to bring a tensor from `empty` near; memory always is."""

    def page_out(self, tensor: Tensor) -> None:
        """Let a tensor from `empty` go until it is used again, where that saves memory."""

    def _grow(self, size: int) -> None:
        self._extent_start += len(self._extent) if self._extent is not None else 0
        os.ftruncate(self.file, max(os.fstat(self.file).st_size, self._extent_start + size))
        self._extent, self._extent_used = mmap.mmap(self.file, size, offset=self._extent_start), 0


class PeerSegment:
    """The memory of another rank of this machine.

    Args:
        process: process id of the rank.
        file: its file descriptor of the memory.
        token: the first number in the memory.

    Raises:
        OSError: if the memory cannot be opened from here, or belongs to another rank.
    """

    def __init__(self, process: int, file: int, token: int) -> None:
        self._file = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._kept: dict[tuple[int, int, torch.dtype], Tensor] = {}
        if os.fstat(self._file).st_size == 0 or self.map_view(0, 1, torch.int64).item() != token:
            raise FileNotFoundError(f"process {process} has no memory to share")

    def map_view(self, place: int, count: int, dtype: torch.dtype, is_kept: bool = False) -> Tensor:
        """Map [count] values that start at byte `place` of the file, for the lifetime of the tensor.

        Args:
            is_kept: whether to keep the mapping for later calls; mapping a page takes as long as reading it.
        """
        if not is_kept:
            return self._map(place, count, dtype)
        key = (place, count, dtype)
        if key not in self._kept:
            if len(self._kept) == _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = self._map(*key)
        return self._kept[key]

    def _map(self, place: int, count: int, dtype: torch.dtype) -> Tensor:
        start = place // _PAGE * _PAGE
        size = place - start + count * dtype.itemsize
        pages = mmap.mmap(self._file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=start)
        return torch.frombuffer(pages, dtype=dtype, count=count, offset=place - start)
