"""Stores of bytes outside of a rank's device: a file for a CPU, page-locked memory for a GPU, and both.

Nothing here makes the host wait while there is something to compute: copies to and from a file run in threads, those
of a GPU on a stream of their own.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.zero.bucket_layout import StateMemory
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
        option: the option that names the directory, for messages.
    """

    def __init__(self, directory: Path, option: str) -> None:
        self.directory, self.option = directory, option
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="page_out")
        self._unwritten: deque[tuple[Future[None], int]] = deque()
        super().__init__(open_unnamed(directory, option))

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate [count] zeros at the start of a page, or raise a ConfigurationError if the disk is full."""
        tensor = super().empty(count, dtype)
        self._allocate(self.place(tensor), _size(tensor))
        return tensor

    def reserve(self, size: int) -> None:
        """Take `size` bytes of the disk in advance, or raise a ConfigurationError, so that none lack in mid-step."""
        if size > 0:
            self._allocate(self._extent_start + self._extent_used, size)

    def read_ahead(self, tensor: Tensor) -> None:
        """Start to read a tensor from `empty`, or a view of one that starts with it; ignore other tensors."""
        if (found := self._places.get(tensor.data_ptr())) is not None:
            extent, start, _ = found
            extent.madvise(mmap.MADV_WILLNEED, start, _size(tensor))

    def page_out(self, tensor: Tensor) -> None:
        """Write the pages of a tensor of `empty`, or a view from its start, in the background; others stay."""
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


class Copy(Protocol):
    """A copy of bytes outside of the device; its space is free again when it is deleted."""

    def finish(self) -> None:
        """Wait until it is complete, so that the memory that was copied may be used again."""

    def give_up(self) -> None:
        """Let the memory that is copied be freed before `finish`, because no copy is needed."""

    def start(self) -> None:
        """Start to bring the bytes back."""

    def take(self) -> Tensor:
        """Return the bytes on the device, uint8 [size], in new memory."""


class Store(Protocol):
    """Where copies are."""

    def put(self, data: Tensor) -> Copy:
        """Start to copy `data`, uint8 [size], which must not change until the copy is complete."""


class FileStore:
    """Copies of host memory in a file without a name.

    One thread writes and another reads, so that what a backward pass needs does not wait for what a forward pass
    leaves. The system starts to write pages to the disk at once, and can use their memory as soon as it needs some.

    Args:
        option: the option that names the directory, for messages.
    """

    def __init__(self, directory: Path, option: str) -> None:
        self.directory, self.option, self.space = directory, option, FileSpace()
        self.file = open_unnamed(directory, option)
        weakref.finalize(self, os.close, self.file)
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="activations out")
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="activations in")
        self.write(torch.zeros(mmap.PAGESIZE, dtype=torch.uint8), 0)  # a full disk is reported now

    def put(self, data: Tensor) -> FileCopy:
        """Start to copy host memory."""
        return FileCopy(self, data.numel(), lambda: data)

    def write(self, data: Tensor, place: int) -> None:
        """Write bytes at `place`."""
        rest = memoryview(data.numpy())
        while rest:
            try:
                written = os.pwrite(self.file, rest, place)
            except OSError as error:
                if not is_full(error):
                    raise
                raise ConfigurationError(no_space(self.option, self.directory, len(rest))) from error
            os.posix_fadvise(self.file, place, written, os.POSIX_FADV_DONTNEED)  # starts to write pages to the disk
            rest, place = rest[written:], place + written

    def read(self, data: Tensor, place: int) -> None:
        """Fill `data` with the bytes at `place`."""
        rest = memoryview(data.numpy())
        while rest:
            count = os.preadv(self.file, [rest], place)
            if not count:
                raise OSError(f"the file of {self.option} ends before what was written to it")
            rest, place = rest[count:], place + count


class FileCopy:
    """A copy in the file of a `FileStore`.

    Args:
        source: returns the bytes once they are in host memory; runs in the thread that writes.
        allocate: returns memory to read so many bytes to.
    """

    def __init__(
        self, store: FileStore, size: int, source: Callable[[], Tensor], allocate: Callable[[int], Tensor] | None = None
    ) -> None:
        self._store, self._size, self._allocate = store, size, allocate or _empty
        self._length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._place = store.space.take(self._length)
        self._write = store.writer.submit(_write_from, source, store, self._place)
        self._read: tuple[Future[None], Tensor] | None = None

    def __del__(self) -> None:
        # A later copy may take the space while this one is being written: the same thread writes it afterwards.
        self._store.space.give_back(self._place, self._length)

    def finish(self) -> None:
        """Wait until the bytes are written."""
        self._write.result()

    def give_up(self) -> None:
        """Write nothing, unless the thread that writes has begun to, which keeps the memory until it ends."""
        self._write.cancel()

    def start(self) -> None:
        """Start to read the bytes."""
        if self._read is None:
            target = self._allocate(self._size)
            self._read = self._store.reader.submit(self._store.read, target, self._place), target

    def take(self) -> Tensor:
        """Return the bytes in new host memory."""
        self.start()
        (reading, target), self._read = self._read, None
        reading.result()
        return target


def _empty(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _write_from(source: Callable[[], Tensor], store: FileStore, place: int) -> None:
    store.write(source(), place)


class FileMemory(StateMemory):
    """Memory in the file of a rank."""

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
