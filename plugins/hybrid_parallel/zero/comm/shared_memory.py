"""Memory that the ranks of one machine read in each other's processes.

A rank's memory is one anonymous file (`memfd_create`): no name that could be taken, no limit of /dev/shm, and nothing
to clean up after a rank that was killed, as it is gone with the last process that has it open. Others open it by way of
/proc and map what they read for the time in which they read it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref

import torch
from torch import Tensor

_PAGE = mmap.ALLOCATIONGRANULARITY
# Address space is taken in pieces of at least this many bytes; pages come when they are written.
_EXTENT = 2**28
_MOST_KEPT = 8  # windows of one neighbour


class SharedSegment:
    """This rank's memory for others to read. Its first number is one that no other memory has."""

    def __init__(self) -> None:
        self.file = os.memfd_create("booster", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        self._extent: mmap.mmap | None = None
        self._extent_start = self._extent_used = 0
        self._places: dict[int, tuple[mmap.mmap, int, int]] = {}  # address -> its extent, place in that, in the file
        self.token = secrets.randbits(62)
        self.empty(1, torch.int64).fill_(self.token)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count] zeros, at the start of a page."""
        size = max(1, -(-count * dtype.itemsize // _PAGE)) * _PAGE
        if self._extent is None or self._extent_used + size > len(self._extent):
            self._grow(max(size, _EXTENT))
        start, self._extent_used = self._extent_used, self._extent_used + size
        tensor = torch.frombuffer(self._extent, dtype=dtype, count=count, offset=start)
        self._places[tensor.data_ptr()] = (self._extent, start, self._extent_start + start)
        return tensor

    def place(self, tensor: Tensor) -> int:
        """Where a tensor that `empty` gave starts in the file, in bytes."""
        return self._places[tensor.data_ptr()][2]

    def release(self, tensor: Tensor) -> None:
        """Give the pages of a tensor that `empty` gave back to the system; its values are lost."""
        extent, start, _ = self._places.pop(tensor.data_ptr())
        size = -(-tensor.numel() * tensor.element_size() // _PAGE) * _PAGE
        extent.madvise(mmap.MADV_REMOVE, start, size)

    def _grow(self, size: int) -> None:
        self._extent_start += len(self._extent) if self._extent is not None else 0
        os.ftruncate(self.file, self._extent_start + size)
        self._extent, self._extent_used = mmap.mmap(self.file, size, offset=self._extent_start), 0


class PeerSegment:
    """The memory of another rank of this machine.

    Args:
        process: its process id.
        file: what it calls its memory's file.
        token: the first number in it.

    Raises:
        OSError: it cannot be opened from here, or is another's.
    """

    def __init__(self, process: int, file: int, token: int) -> None:
        self._file = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._kept: dict[tuple[int, int, torch.dtype], Tensor] = {}
        if os.fstat(self._file).st_size == 0 or self.map_view(0, 1, torch.int64).item() != token:
            raise FileNotFoundError(f"process {process} has no memory to share")

    def map_view(self, place: int, count: int, dtype: torch.dtype, is_kept: bool = False) -> Tensor:
        """[count] of what starts `place` bytes into the file, mapped as long as the tensor is there.

        Args:
            is_kept: whether it will be asked for again soon; to map a page takes as long as to read it.
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
