"""PagedFile: tensors of a rank in a file, which the system reads and writes as they are used.

A tensor is a mapping of its part of the file, so every operation of torch works on it. What the functions here add is
when pages come and go: they decide about time and resident memory, never about values.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.zero.collectives.shared_memory import SharedSegment

# Bytes that may wait to be written. A memory cgroup counts pages as used until they are on the disk: without a limit, a
# rank that computes faster than its disk writes would be killed although it needs little memory.
_MOST_UNWRITTEN = 2**25
_WRITE_AND_WAIT = 7  # SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER


class PagedFile(SharedSegment):
    """Memory in a file without a name: jobs cannot meet in it, and it is gone with its process, also after a kill.

    Pages of it that were used are resident until `page_out`. Then they are written in the background and, as pages of
    any file, stay in the page cache as long as the system has memory for it. Other ranks of the machine can read it.

    Args:
        directory: where the file is; created if its parent exists.
        option: the option that names the directory, for messages.
    """

    def __init__(self, directory: Path, option: str) -> None:
        self.directory, self.option = directory, option
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="page_out")
        self._unwritten: deque[tuple[Future[None], int]] = deque()
        super().__init__(open_unnamed(directory, option))

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate [count] zeros at the start of a page.

        Raises:
            ConfigurationError: if the file system has no space for them.
        """
        tensor = super().empty(count, dtype)
        self._allocate(self.place(tensor), _size(tensor))
        return tensor

    def reserve(self, size: int) -> None:
        """Take space on the disk for what is going to be allocated, so that it cannot be missing in mid-step.

        Args:
            size: bytes.

        Raises:
            ConfigurationError: if the file system has less space.
        """
        if size > 0:
            self._allocate(self._extent_start + self._extent_used, size)

    def read_ahead(self, tensor: Tensor) -> None:
        """Start to read a tensor from `empty`, or a view of one that starts with it; ignore other tensors."""
        if (found := self._places.get(tensor.data_ptr())) is not None:
            extent, start, _ = found
            extent.madvise(mmap.MADV_WILLNEED, start, _size(tensor))

    def page_out(self, tensor: Tensor) -> None:
        """Give up the pages of a tensor from `empty`, or of a view of one that starts with it; ignore other tensors.

        They are written in the background; the call waits only if the disk is far behind.
        """
        found = self._places.get(tensor.data_ptr())
        if found is None or not tensor.numel():
            return
        extent, start, place = found
        size = _size(tensor)
        extent.madvise(mmap.MADV_DONTNEED, start, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._unwritten.append((self._writer.submit(_write_out, self.file, place, size), size))
        waiting = sum(size for _, size in self._unwritten)
        while self._unwritten and (waiting > _MOST_UNWRITTEN or self._unwritten[0][0].done()):
            write, size = self._unwritten.popleft()
            write.result()
            waiting -= size

    def _allocate(self, place: int, size: int) -> None:
        """Take space on the disk for a part of the file."""
        try:
            # Asked first: a file system may take all that is left before it finds that this is too little.
            if size > _free_bytes(self.directory):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self.file, place, size)
        except OSError as error:
            if not is_full(error):
                raise
            raise ConfigurationError(no_space(self.option, self.directory, size)) from error


def open_unnamed(directory: Path, option: str) -> int:
    """Open a new file without a name in a directory, which is created if its parent exists."""
    try:
        directory.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):  # some file systems know only files with names
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        file, name = tempfile.mkstemp(prefix="booster-", dir=directory)
        os.unlink(name)
        return file
    except OSError as error:
        reason = "it is a file" if directory.is_file() else error.strerror
        raise ConfigurationError(
            f"{option}={str(directory)!r} cannot hold the file of a rank ({reason}); name a directory "
            "that every rank can write to"
        ) from error


def is_full(error: OSError) -> bool:
    """Return whether a file system has refused to hold more."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def no_space(option: str, directory: Path, size: int) -> str:
    """Return the sentence about a directory that cannot hold `size` bytes more."""
    return (
        f"{option}={str(directory)!r} has no space for {size / 2**20:.1f} MiB more of this rank: "
        f"{_free_bytes(directory) / 2**20:.1f} MiB are free; free some, or name a directory with more"
    )


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _write_out(file: int, place: int, size: int) -> None:
    """Write the changed pages of a part of a file, and wait until they are on the disk."""
    write = _sync_file_range()
    if write is not None:
        write(file, ctypes.c_int64(place), ctypes.c_int64(size), ctypes.c_uint(_WRITE_AND_WAIT))


@cache
def _sync_file_range() -> Any:
    """Return the system call of Linux; None elsewhere, where the system writes pages when it likes.

    `mmap.flush` would hold Python's lock while it writes, and `os.fdatasync` writes pages that are in use.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        return ctypes.CDLL(None).sync_file_range
    return None


class FileSpace:
    """Ranges of a file: the smallest free range that is large enough is taken first, and neighbours are joined.

    Attributes:
        size: bytes of the file so far.
    """

    def __init__(self) -> None:
        self.size = 0
        self._free: list[tuple[int, int]] = []  # (offset, length), by offset
        self._given_back: deque[tuple[int, int]] = deque()

    def take(self, length: int) -> int:
        """Return the offset of a range of `length` bytes."""
        while self._given_back:
            self._join(*self._given_back.popleft())
        fitting = [(free, index) for index, (_, free) in enumerate(self._free) if free >= length]
        if not fitting:
            offset, self.size = self.size, self.size + length
            return offset
        free, index = min(fitting)
        offset, _ = self._free.pop(index)
        if free > length:
            self._free.insert(index, (offset + length, free - length))
        return offset

    def give_back(self, offset: int, length: int) -> None:
        """Take a range back; any thread may call this, also while `take` runs, as the garbage collector does."""
        self._given_back.append((offset, length))

    def _join(self, offset: int, length: int) -> None:
        """Add a range to the free ones, and join it with those that it touches."""
        index = bisect.bisect(self._free, (offset, length))
        if index < len(self._free) and self._free[index][0] == offset + length:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            offset, before = self._free.pop(index - 1)
            length += before
            index -= 1
        self._free.insert(index, (offset, length))
