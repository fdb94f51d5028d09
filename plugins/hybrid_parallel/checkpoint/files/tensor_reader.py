"""Reader that copies parts of tensors from safetensors files into preallocated memory."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import safe_open
from torch import Tensor

from plugins.hybrid_parallel.checkpoint.files.tensor_file import DTYPE_NAMES, read_header
from plugins.hybrid_parallel.distributed.checksum import read_at

_MAPPED = 16 * 2**20  # bytes of a file, by each thread that reads
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class TensorFileReader:
    """A safetensors file opened for reading; a context manager.

    A range that is contiguous in the file is read directly into the target, which is about twice as fast as a copy from
    mapped memory. Other ranges are copied from mappings of a few rows: the pages of a mapping stay resident until it is
    closed, and those of a whole file would be all weights whose columns are sharded.

    Args:
        path: path of the file.

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
        """Fill `target`, of shape `lengths`, with one rectangle of a tensor.

        Args:
            name: name of the tensor in the file.
            offsets, lengths: position and shape of the rectangle in the tensor.
            target: tensor that receives the values; its dtype may differ from that of the file.
        """
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
    """Return the start of a rectangle in the flattened tensor if it is contiguous there, otherwise None.

    A rectangle is contiguous if every dim after its first dim of length != 1 is complete.
    """
    cut = next((dim for dim, length in enumerate(lengths) if length != 1), len(shape))
    if list(lengths[cut + 1 :]) != list(shape[cut + 1 :]):
        return None
    return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))
