"""Safetensors files, written tensor by tensor.

`safetensors.save_file` wants all tensors of a file at once. Here only their names, dtypes and shapes are known
beforehand; each tensor is handed over, written without a copy, and may be dropped before the next one is made.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from plugins.hybrid_parallel.distributed.checksum import CHUNK, add_to_checksum, bytes_of

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
LENGTH_BYTES = 8  # in front of the header
_SEND_EVERY = 64 * 2**20  # bytes
_METADATA = "__metadata__"
_LARGEST_HEADER = 100_000_000  # bytes; the format's own readers refuse more


class TensorFileWriter:
    """A safetensors file that is filled one tensor at a time.

    A context manager: on leaving it without an error, all tensors have been written and are on the disk. What an
    error leaves is a part of a file, under a name that the caller is to choose so that nobody reads it.

    The long parts release Python's lock, so that a thread may write while others compute.

    Args:
        path: of the new file; one that is there is overwritten.
        entries: name -> dtype and shape, of every tensor.
        metadata: texts for the file's header.

    Raises:
        ValueError: a dtype that the format has not, a name that it keeps for itself, or too many names.
        OSError: the file cannot be made.
    """

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self._entries = path, dict(entries)
        self._offsets = _offsets(self._entries)
        header = _header(self._entries, self._offsets, metadata)
        self._missing = set(self._entries)
        self._start, self._sent = len(header), 0  # bytes
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            self._reserve(self._start + sum(_size(*entry) for entry in self._entries.values()))
            self._write_at(0, memoryview(header))
        except OSError:
            self.close()
            raise

    def write(self, name: str, tensor: Tensor) -> int:
        """Write one tensor, best in the order of the entries, in which they lie in the file.

        Args:
            tensor: of the dtype and shape announced; on any device.

        Returns:
            `plugins.hybrid_parallel.distributed.checksum.checksum` of the tensor.

        Raises:
            ValueError: the tensor was not announced like this, or is written for the second time.
            OSError: the disk is full, or broken.
        """
        announced = self._entries.get(name)
        if announced != (tensor.dtype, tuple(tensor.shape)) or name not in self._missing:
            raise ValueError(
                f"{self.path} expects {name} once, as {announced}, not {(tensor.dtype, tuple(tensor.shape))} "
                f"{'for the second time' if name not in self._missing else ''}"
            )
        self._missing.discard(name)
        position, running = self._start + self._offsets[name], 0
        for chunk in bytes_of(tensor).split(CHUNK):  # read by the checksum and then, out of the cache, by the write
            data = chunk.cpu().numpy()
            running = add_to_checksum(running, data)
            self._write_at(position, memoryview(data))
            position += data.nbytes
            self._send(position)
        return running

    def finish(self) -> None:
        """Wait until the file is on the disk, and close it.

        Raises:
            ValueError: tensors were announced and not written.
            OSError: the disk is full, or broken.
        """
        try:
            if self._missing:
                raise ValueError(f"{self.path} still expects {sorted(self._missing)[:5]}")
            with naming(self.path):
                os.fsync(self._file)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file as it is; it is of no use unless `finish` came before."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        self.close()

    def _send(self, position: int) -> None:
        """Let the disk begin with what lies before `position`: the system would wait for the `fsync` at the end.

        Linux takes the advice so. Pages that are still to be written, as these are, stay in its cache.
        """
        if position - self._sent >= _SEND_EVERY and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, self._sent, position - self._sent, os.POSIX_FADV_DONTNEED)
            self._sent = position

    def _reserve(self, size: int) -> None:
        """Ask for the whole file's room at once: a full disk is known now, and writing is about twice as fast."""
        try:
            with naming(self.path):
                os.posix_fallocate(self._file, 0, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise  # other errors say that this file system does not reserve

    def _write_at(self, position: int, data: memoryview) -> None:
        with naming(self.path):
            while data:
                written = os.pwrite(self._file, data, position)
                data, position = data[written:], position + written


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of calls that take a descriptor get the name of the file, which the system does not know there."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_header(file: BinaryIO) -> tuple[int, dict[str, Any]]:
    """Where the tensors of an open file begin, and what its header says of each; the file is known to be sound."""
    file.seek(0)
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    return LENGTH_BYTES + length, json.loads(file.read(length))


def sync_directory(directory: Path) -> None:
    """Wait until the names of a directory's files, new and removed, are on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        with naming(directory):
            os.fsync(handle)
    finally:
        os.close(handle)


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _offsets(entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, int]:
    """Where each tensor starts; wide dtypes come first, so that every tensor is aligned to its own."""
    offsets, position = {}, 0
    for name, (dtype, shape) in sorted(entries.items(), key=lambda entry: -entry[1][0].itemsize):
        offsets[name] = position
        position += _size(dtype, shape)
    return offsets


def _header(
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    offsets: Mapping[str, int],
    metadata: Mapping[str, str] | None,
) -> bytes:
    """The length of the JSON in 8 bytes, and the JSON, padded by blanks so that the tensors are aligned to 8 bytes."""
    if _METADATA in entries:
        raise ValueError(f"no tensor of a safetensors file can be called {_METADATA}; give it another name")
    described: dict[str, object] = {} if metadata is None else {_METADATA: dict(metadata)}
    for name, start in offsets.items():
        dtype, shape = entries[name]
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"{name} has dtype {dtype}, which safetensors files cannot hold; convert it to another")
        stop = start + _size(dtype, shape)
        described[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LARGEST_HEADER:
        raise ValueError(
            f"the header of {len(entries)} tensors has {len(text)} bytes, more than the {_LARGEST_HEADER} that readers "
            "of safetensors files take; spread them over more files"
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
