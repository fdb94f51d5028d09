"""Files of a checkpoint: safetensors files, written and read in parts of tensors, and the manifest of their chunks.

`safetensors.save_file` needs all tensors of a file at once. This writer needs only their names, dtypes and shapes in
advance. Each tensor is written without a copy, and the caller may free it before it produces the next one. A rank with
several cores reads by several threads (`for_each`): one does not saturate memory bandwidth.

The manifest is one JSON object and the last file that a save writes: a directory without it is not a checkpoint. Its
checksums, of every chunk, every file header and itself, cover all bytes of all files.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint.checks import check_size
from plugins.hybrid_parallel.distributed.agreement import CHUNK, add_to_checksum, checksum_in_file, host_chunks, read_at

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
LENGTH_BYTES = 8  # size of the length prefix of the header
_SEND_EVERY = 64 * 2**20  # bytes
_METADATA = "__metadata__"
_LARGEST_HEADER = 100_000_000  # bytes; the format's own readers refuse more


class TensorFileWriter:
    """A safetensors file that is written one tensor at a time.

    Use it as a context manager: when the block exits without an error, all tensors have been written and synced to
    disk. After an error, a partial file remains; choose a path that no reader opens.

    The long operations release the GIL, so one thread can write while others compute.

    Args:
        path: path of the new file; an existing file is overwritten.
        entries: name -> (dtype, shape) of every tensor.
        metadata: strings for the header of the file.

    Raises:
        OSError: the file cannot be created.
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
        """Write one tensor; writing in file order (widest dtypes first, then the order of `entries`) is fastest.

        Args:
            tensor: tensor with the announced dtype and shape, on any device.

        Returns:
            `plugins.hybrid_parallel.distributed.agreement.checksum` of the tensor.

        Raises:
            OSError: the disk is full or has failed.
        """
        announced = self._entries.get(name)
        if announced != (tensor.dtype, tuple(tensor.shape)) or name not in self._missing:
            raise ValueError(
                f"{self.path} expects {name} once, as {announced}, not {(tensor.dtype, tuple(tensor.shape))} "
                f"{'for the second time' if name not in self._missing else ''}"
            )
        self._missing.discard(name)
        position, running = self._start + self._offsets[name], 0
        for chunk in host_chunks(tensor, CHUNK):  # the write then reads the chunk from the CPU cache
            data = chunk.numpy()
            running = add_to_checksum(running, data)
            self._write_at(position, memoryview(data))
            position += data.nbytes
            self._send(position)
        return running

    def finish(self) -> None:
        """Sync the file to disk and close it; raises OSError if the disk is full or has failed."""
        try:
            if self._missing:
                raise ValueError(f"{self.path} still expects {sorted(self._missing)[:5]}")
            with naming(self.path):
                os.fsync(self._file)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file as it is; without a preceding `finish` its content is unusable."""
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
        """Write the bytes before `position` to disk now, as Linux reads this advice; `fsync` would wait for them."""
        if position - self._sent >= _SEND_EVERY and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, self._sent, position - self._sent, os.POSIX_FADV_DONTNEED)
            self._sent = position

    def _reserve(self, size: int) -> None:
        """Reserve the full size of the file: this detects a full disk early and makes writing about twice as fast."""
        try:
            with naming(self.path):
                os.posix_fallocate(self._file, 0, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise  # other errors mean that the file system does not support preallocation

    def _write_at(self, position: int, data: memoryview) -> None:
        with naming(self.path):
            while data:
                written = os.pwrite(self._file, data, position)
                data, position = data[written:], position + written


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file name to errors of calls that take a descriptor, because the operating system does not report it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_header(file: BinaryIO) -> tuple[int, dict[str, Any]]:
    """Return the offset of the tensor data in an open file and its parsed header; the file must be valid."""
    file.seek(0)
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    return LENGTH_BYTES + length, json.loads(file.read(length))


def sync_directory(directory: Path) -> None:
    """Sync a directory to disk, so that created, renamed and removed entries persist."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        with naming(directory):
            os.fsync(handle)
    finally:
        os.close(handle)


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _offsets(entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, int]:
    """Return the offset of each tensor; wide dtypes come first, so that each tensor is aligned to its item size."""
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
    """Return the 8-byte header length and the JSON header, padded with spaces to align the tensor data to 8 bytes."""
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


_MOST = 8
Item = TypeVar("Item")


def for_each(work: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Call `work` for each item in a thread pool, and raise the first error; `work` should mostly release the GIL."""
    threads = _cores_of_a_rank()
    if threads == 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="booster-read") as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _cores_of_a_rank() -> int:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size() if dist.is_initialized() else 1))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // ranks_here, 1), _MOST)


_MAPPED = 16 * 2**20  # bytes of a file, by each thread that reads
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class TensorFileReader:
    """A safetensors file opened for reading; a context manager.

    A range that is contiguous in the file is read directly into the target, which is about twice as fast as a copy from
    mapped memory. Other ranges are copied from mappings of a few rows: the pages of a mapping stay resident until it is
    closed, and those of a whole file would be all weights whose columns are sharded.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: the file is truncated or not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="pt"):
            pass  # checks the file
        self._file = path.open("rb", buffering=0)
        self._start, self._entries = read_header(self._file)

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int], target: Tensor) -> None:
        """Fill `target`, of shape `lengths` and any dtype, with the rectangle of a tensor at `offsets`."""
        entry = self._entries[name]
        if entry["dtype"] not in _DTYPES:
            raise OSError(f"{name} has dtype {entry['dtype']} in {self._file.name}, which no parameter has; convert it")
        dtype, position = _DTYPES[entry["dtype"]], self._start + entry["data_offsets"][0]
        start = _in_one_piece(entry["shape"], offsets, lengths)
        direct = start is not None and target.is_contiguous() and target.device.type == "cpu"
        if not direct or target.dtype != dtype:
            self._copy_rows(position, dtype, entry["shape"], offsets, lengths, target)
            return
        buffer = memoryview(target.view(-1).view(torch.uint8).numpy())
        if read_at(self._file.fileno(), position + start * dtype.itemsize, buffer) < len(buffer):
            raise OSError(f"{self._file.name} ends in the middle of {name}; load another checkpoint")

    def _copy_rows(
        self,
        position: int,
        dtype: torch.dtype,
        shape: Sequence[int],
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: Tensor,
    ) -> None:
        """Copy a rectangle of the tensor at byte `position` of the file, a few rows (entries of dim 0) at a time."""
        if not target.numel():
            return
        if not shape:
            shape, offsets, lengths, target = [1], [0], [1], target.view(1)
        row = math.prod(shape[1:]) * dtype.itemsize
        ranges = [slice(at, at + length) for at, length in zip(offsets[1:], lengths[1:], strict=True)]
        step = max(1, _MAPPED // row)
        for done in range(0, lengths[0], step):
            count = min(step, lengths[0] - done)
            rows = self._map(position + (offsets[0] + done) * row, count * row, dtype).view(count, *shape[1:])
            target[done : done + count].copy_(rows[(slice(None), *ranges)])

    def _map(self, position: int, size: int, dtype: torch.dtype) -> Tensor:
        """Map `size` bytes of the file into memory, as a tensor that unmaps them when it is released."""
        before = position % mmap.ALLOCATIONGRANULARITY
        # A private copy, because torch warns of memory that cannot be written.
        mapping = mmap.mmap(self._file.fileno(), before + size, access=mmap.ACCESS_COPY, offset=position - before)
        return torch.frombuffer(mapping, dtype=dtype, offset=before)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _in_one_piece(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> int | None:
    """Return a rectangle's start in the flattened tensor if it is contiguous there; None otherwise."""
    cut = next((dim for dim, length in enumerate(lengths) if length != 1), len(shape))
    if list(lengths[cut + 1 :]) != list(shape[cut + 1 :]):
        return None
    return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))


FORMAT, VERSION = "hybrid-booster checkpoint", 1
_CHECKSUM = b', "crc32": '
_SEQUENCE = re.compile(rb'^\{"format": "[^"]*", "version": \d+, "sequence": (\d+),')


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor that is stored in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    checksum: int

    def key(self, name: str) -> str:
        """Return the name of the chunk in its file."""
        return chunk_key(name, self.offsets)


@dataclass
class SavedTensor:
    """A whole tensor: its shape, its dtype, and the chunks that it is stored in."""

    shape: tuple[int, ...]
    dtype: str
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that `dtype` names."""
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class SavedFile:
    """Size of a file, and checksum of its header (everything in it that is not a chunk)."""

    size: int
    header_checksum: int


@dataclass
class Manifest:
    """Contents of a checkpoint."""

    sequence: int  # number that grows with each save in a folder; the largest is the newest
    files: dict[str, SavedFile]  # file name -> size and header checksum
    tensors: dict[str, SavedTensor]  # logical name -> tensor
    state: dict[str, Any]  # everything that is not a tensor, as JSON
    checksum: int = 0  # checksum of the text that was read; 0 for a manifest that was not read from a file

    def to_bytes(self) -> bytes:
        """Return the JSON text, ending in its own checksum."""
        body = json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "sequence": self.sequence,
                "files": {name: asdict(file) for name, file in self.files.items()},
                "tensors": {
                    name: {
                        "shape": tensor.shape,
                        "dtype": tensor.dtype,
                        "chunks": [[chunk.offsets, chunk.sizes, chunk.file, chunk.checksum] for chunk in tensor.chunks],
                    }
                    for name, tensor in self.tensors.items()
                },
                "state": self.state,
            }
        ).encode()
        return body[:-1] + _CHECKSUM + b"%d}" % zlib.crc32(body)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read and check a manifest file."""
        if not path.is_file():
            raise ConfigurationError(
                f"{path.parent} has no {path.name}: it is no checkpoint, or its save did not finish; "
                "give a directory that save_checkpoint finished"
            )
        with naming(path):
            text = path.read_bytes()
        front, _, checksum = text.rpartition(_CHECKSUM)
        if checksum != b"%d}" % zlib.crc32(front + b"}"):
            raise ConfigurationError(f"{path} is damaged (its checksum does not match); load another checkpoint")
        found = json.loads(front + b"}")
        if found["format"] != FORMAT or found["version"] != VERSION:
            raise ConfigurationError(
                f"{path} has the format {found['format']!r} version {found['version']}; this package reads "
                f"{FORMAT!r} version {VERSION}"
            )
        for name in found["files"]:
            if Path(name).name != name:
                raise ConfigurationError(f"{path} names the file '{name}' outside of its directory; do not load it")
        return cls(
            sequence=found["sequence"],
            files={name: SavedFile(**file) for name, file in found["files"].items()},
            tensors={
                name: SavedTensor(
                    tuple(tensor["shape"]), tensor["dtype"], [_chunk(*chunk) for chunk in tensor["chunks"]]
                )
                for name, tensor in found["tensors"].items()
            },
            state=found["state"],
            checksum=zlib.crc32(text),
        )

    def verify_file(self, directory: Path, name: str) -> None:
        """Compare a file's bytes with the checksums; refuses a missing or damaged one, with its tensor."""
        path = directory / name
        check_size(path, self.files[name].size)
        with naming(path):
            self._verify_content(path)

    def _verify_content(self, path: Path) -> None:
        name, expected = path.name, self.files[path.name]
        with path.open("rb") as file:
            if header_checksum(path) != expected.header_checksum:
                raise ConfigurationError(f"{path} is damaged in its header; load another checkpoint")

            def verify(found: tuple[str, Chunk, int, int]) -> None:
                tensor, chunk, begin, end = found
                if checksum_in_file(file.fileno(), begin, end - begin) != chunk.checksum:
                    raise ConfigurationError(f"{path} is damaged in the tensor {tensor}; load another checkpoint")

            for_each(verify, sorted(self._chunks_of(file, name), key=lambda found: found[2]))

    def _chunks_of(self, file: Any, name: str) -> Iterator[tuple[str, Chunk, int, int]]:
        """Yield (tensor, chunk, first byte, end) for each chunk in a file whose header is valid."""
        start, entries = read_header(file)
        for tensor, saved in self.tensors.items():
            for chunk in saved.chunks:
                if chunk.file == name:
                    begin, end = entries[chunk.key(tensor)]["data_offsets"]
                    yield tensor, chunk, start + begin, start + end


def chunk_key(name: str, offsets: Sequence[int]) -> str:
    """Return the name of a chunk in its file."""
    return f"{name}@{','.join(map(str, offsets))}"


def name_and_offsets(key: str) -> tuple[str, tuple[int, ...]]:
    """Return the name of a tensor and the offsets of its chunk from `chunk_key`."""
    name, _, offsets = key.rpartition("@")
    return name, tuple(map(int, filter(None, offsets.split(","))))


def header_checksum(path: Path) -> int:
    """Return the checksum of everything in a safetensors file that precedes the tensor data."""
    with path.open("rb") as file:
        length = file.read(LENGTH_BYTES)
        # A damaged length may be larger than any file.
        header = file.read(min(int.from_bytes(length, "little"), path.stat().st_size))
        return zlib.crc32(header, zlib.crc32(length))


def sequence_of(path: Path) -> int | None:
    """Return the sequence number of a manifest, read from its first bytes, or None if it cannot be read."""
    try:
        with path.open("rb") as file:
            found = _SEQUENCE.match(file.read(200))
    except OSError:
        return None
    return None if found is None else int(found.group(1))


def merge_tensors(parts: Sequence[Mapping[str, Any]]) -> dict[str, SavedTensor]:
    """Merge the tensors of all ranks, given the results of `write_tensors`."""
    merged: dict[str, SavedTensor] = {}
    for part in parts:
        for name, (shape, dtype, chunks) in part.items():
            tensor = merged.setdefault(name, SavedTensor(tuple(shape), dtype))
            tensor.chunks += [_chunk(*chunk) for chunk in chunks]
    return merged


def _chunk(offsets: Sequence[int], sizes: Sequence[int], file: str, checksum: int) -> Chunk:
    return Chunk(tuple(offsets), tuple(sizes), file, checksum)
