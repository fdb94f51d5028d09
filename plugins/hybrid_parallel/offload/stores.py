"""Stores of bytes outside of a rank's device: a file for a CPU, page-locked memory for a GPU, and both.

Nothing here makes the host wait while there is something to compute: copies to and from a file run in threads, those
of a GPU on a stream of their own.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.offload.paged_file import FileSpace, PagedFile, is_full, no_space, open_unnamed
from plugins.hybrid_parallel.zero.bucket_layout import StateMemory


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
        directory: where the file is; created if its parent exists.
        option: the option that names the directory, for messages.

    Attributes:
        space: the parts of the file.
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
        store: the store.
        size: bytes.
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
