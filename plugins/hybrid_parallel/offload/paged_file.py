"""PagedFile: tensors of a rank in a file, which the system reads and writes as they are used."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.zero.comm.shared_memory import SharedSegment


class PagedFile(SharedSegment):
    """Memory in a file without a name: jobs cannot meet in it, and it is gone with its process, also after a kill.

    Pages of it that were written stay in memory until `page_out`. Other ranks of the machine can read it.

    Args:
        directory: where the file is; created if its parent exists.
        option: the option that names the directory, for messages.

    Raises:
        ConfigurationError: if the directory cannot be created or written to.
    """

    def __init__(self, directory: Path, option: str) -> None:
        self.directory, self.option = directory, option
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="page_out")
        super().__init__(open_unnamed(directory, option))

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate [count] zeros at the start of a page.

        Raises:
            ConfigurationError: if the file system has no space for them.
        """
        tensor = super().empty(count, dtype)
        size = tensor.numel() * tensor.element_size()
        try:
            os.posix_fallocate(self.file, self.place(tensor), size)
        except OSError as error:
            if not is_full(error):
                raise
            raise ConfigurationError(no_space(self.option, self.directory, size)) from error
        return tensor

    def check_space(self, size: int) -> None:
        """Refuse early what will not fit.

        Args:
            size: bytes that this rank is going to allocate.

        Raises:
            ConfigurationError: if the file system has less space.
        """
        if size > _free_bytes(self.directory):
            raise ConfigurationError(no_space(self.option, self.directory, size))

    def read_ahead(self, tensor: Tensor) -> None:
        """Start to read a tensor from `empty`, or a view of one that starts with it."""
        extent, start, _ = self._places[tensor.data_ptr()]
        extent.madvise(mmap.MADV_WILLNEED, start, _size(tensor))

    def page_out(self, tensor: Tensor) -> None:
        """Write a tensor from `empty` to the file in the background; its pages are no memory of this rank any more."""
        extent, start, place = self._places[tensor.data_ptr()]
        size = _size(tensor)
        extent.madvise(mmap.MADV_DONTNEED, start, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._writer.submit(_write_out, self.file, extent, start, place, size)


def open_unnamed(directory: Path, option: str) -> int:
    """Open a new file without a name in a directory, which is created if its parent exists.

    Raises:
        ConfigurationError: if the directory cannot be created or written to.
    """
    try:
        directory.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):  # some file systems know only files with names
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        file, name = tempfile.mkstemp(prefix="booster-", dir=directory)
        os.unlink(name)
        return file
    except OSError as error:
        raise ConfigurationError(
            f"{option}={str(directory)!r} cannot hold the file of a rank ({error.strerror.lower()}); name a directory "
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


def _write_out(file: int, extent: mmap.mmap, start: int, place: int, size: int) -> None:
    """Write pages to the disk, and let the system forget them."""
    with contextlib.suppress(OSError, ValueError):  # of a file that was closed meanwhile
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        extent.flush(first, start + size - first)
        os.posix_fadvise(file, place, size, os.POSIX_FADV_DONTNEED)
