"""Numbers that tell whether two tensors, or a tensor and its bytes in a file, are the same."""

from __future__ import annotations

import os
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ROW = 512  # integers of 8 bytes
CHUNK = 256 * _ROW * 8  # bytes that are looked at together: 1 MiB, which stays in a core's cache


def checksum(tensor: Tensor) -> int:
    """32 bits about a tensor's bytes, from memory at more than half the speed at which it can be read.

    Each chunk of 1 MiB is a table of integers of 8 bytes, 512 in a row. The CRC-32 of the sums of its rows and of its
    columns is taken, and that of the bytes behind the last whole row. Any change of one integer is found, and of rows,
    columns or parts of them that change places; a change that keeps all sums takes four integers at least. A CRC-32
    of all bytes takes three times as long.
    """
    running = 0
    for chunk in bytes_of(tensor).split(CHUNK):
        running = add_to_checksum(running, chunk.cpu().numpy())
    return running


def checksum_in_file(file: int, begin: int, size: int) -> int:
    """`checksum` of the `size` bytes from `begin` on in an open file; of fewer if the file ends before."""
    buffer, running, end = np.empty(min(size, CHUNK), dtype=np.uint8), 0, begin + size
    while begin < end:
        chunk = buffer[: min(end - begin, CHUNK)]
        read = read_at(file, begin, chunk.data)
        running = add_to_checksum(running, chunk[:read])
        begin = begin + read if read == chunk.size else end
    return running


def read_at(file: int, position: int, buffer: memoryview) -> int:
    """Fill `buffer` from an open file; returns the number of bytes, fewer only where the file ends."""
    filled = 0
    while filled < len(buffer):
        read = os.preadv(file, [buffer[filled:]], position + filled)
        if not read:
            break
        filled += read
    return filled


def checksum_of(value: Any) -> int:
    """Of anything whose `repr` says all."""
    return zlib.crc32(repr(value).encode())


def bytes_of(tensor: Tensor) -> Tensor:
    """A tensor's bytes, one after the other."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def add_to_checksum(running: int, data: np.ndarray) -> int:
    """Take in `data`, at most one chunk; only the last of a tensor may be a part of one."""
    whole = data.size - data.size % (_ROW * 8)
    if whole:
        table = data[:whole].view(np.uint64).reshape(-1, _ROW)
        for axis in (1, 0):
            running = zlib.crc32(table.sum(axis=axis, dtype=np.uint64).data, running)
    return zlib.crc32(data[whole:].data, running)
