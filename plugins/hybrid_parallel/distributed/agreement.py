"""Agreement between ranks: checksums, an error of one that is raised on all, and collectives compared before they run.

They are compared by torch's own ProcessGroupWrapper, in a group that is created under `checked_collectives`: operation,
shape and dtype, with global ranks in its errors. Point-to-point messages are not compared: pipelines send the shapes of
their messages.
"""

from __future__ import annotations

import os
import re
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from booster.errors import ConfigurationError, SynchronyError
from booster.logging import get_logger
from shardformer.distributed.collectives import as_bytes
from shardformer.distributed.process_groups import all_gather_json
from shardformer.lazy.weight_files import WeightFileError

_logger = get_logger(__name__)


def raise_on_all_ranks(work: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Do file work on this rank; if it fails on any rank of the group, raise on all of them.

    Errors of every kind are shared: after an error that was not, the other ranks would wait for this one.
    """
    result, problem, cause = None, None, None
    try:
        result = work()
    except Exception as error:
        problem, cause = _sentence(error), error
    problems = [found for found in all_gather_json(problem, group) if found is not None]
    if problems:
        raise ConfigurationError(problems[0]) from cause
    return result


def _sentence(error: Exception) -> str:
    if isinstance(error, ConfigurationError | WeightFileError):
        return str(error)
    if not isinstance(error, OSError | ValueError | KeyError | MemoryError):
        # A mistake of this library, not of the user.
        _logger.error("%s on rank %d", type(error).__name__, dist.get_rank(), exc_info=error)
    said = f"{type(error).__name__} on rank {dist.get_rank()}: {error}"
    if isinstance(error, KeyError) and error.__traceback__ is not None:  # the key alone does not say what lacks it
        *_, last = traceback.extract_tb(error.__traceback__)
        said += f" is not there ({Path(last.filename).name}, line {last.lineno})"
    return said


_MISMATCH = "Detected mismatch between collectives"
_RANK = re.compile(r"Rank (\d+) is running collective")
_CALL = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=\d+, OpType=(?P<operation>\w+)"
    r"(?:, TensorShape=(?P<shape>\[[^\]]*\]), TensorDtypes=(?P<dtype>\w+))?"
)


@contextmanager
def checked_collectives(enabled: bool) -> Iterator[None]:
    """Create groups that compare their collectives, if `enabled`."""
    before = dist.get_debug_level()
    if enabled:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(before)


@contextmanager
def naming_ranks() -> Iterator[None]:
    """Report mismatched collectives in this context by global ranks, as a SynchronyError on the group."""
    try:
        yield
    except RuntimeError as error:
        if _MISMATCH not in str(error):
            raise
        raise SynchronyError(_in_words(str(error), _ranks_of(error.__traceback__))) from error


def _in_words(message: str, ranks: list[int]) -> str:
    """Describe a mismatch; a rank parses another's call with its own number of dims, and may fail to do so."""
    involved = [ranks[int(number)] for number in _RANK.findall(message)]
    calls = {
        ranks[int(call["rank"])]: f"{call['operation']} of {call['dtype'] or ''} {call['shape'] or 'nothing'}"
        for call in _CALL.finditer(message)
    }
    said = [f"rank {rank} calls {calls.get(rank, 'something else, see its message')}" for rank in sorted(involved)]
    return f"ranks {ranks} are out of step: {', '.join(said)}"


def _ranks_of(traceback: TracebackType | None) -> list[int]:
    """Return the global ranks of the group of the failing call: the innermost local variable named `group`."""
    group = None
    while traceback is not None:
        found = traceback.tb_frame.f_locals.get("group")
        group = found if isinstance(found, dist.ProcessGroup) else group
        traceback = traceback.tb_next
    return dist.get_process_group_ranks(group or dist.group.WORLD)


_PART = 16 * 2**20  # bytes of one copy from a GPU: a copy of 1 MiB takes mostly its launch


def host_chunks(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """Yield the bytes of a tensor on any device in host memory, `size` bytes at a time; the last chunk may be smaller.

    From a GPU the next part is copied to page-locked memory while the caller reads the present one.

    Args:
        size: bytes of a chunk. Each is valid until the next is asked for.
    """
    data = as_bytes(tensor.detach().reshape(-1))
    if data.is_cuda and data.numel() > size:
        yield from _copied_ahead(data, size, _page_locked, _start_copy)
    else:
        yield from (chunk.cpu() for chunk in data.split(size))


def _copied_ahead(
    data: Tensor,
    size: int,
    allocate: Callable[[int], Tensor],
    start_copy: Callable[[Tensor, Tensor], Callable[[], None]],
) -> Iterator[Tensor]:
    """Yield chunks of `data` from two buffers, of which one is filled while the other is read.

    Args:
        allocate: returns a buffer of so many bytes in host memory.
        start_copy: starts a copy (target, source), and returns a function that waits for it.
    """
    parts = data.split(max(_PART // size, 1) * size)
    buffers = [allocate(part.numel()) for part in parts[:2]]

    def begin(index: int) -> tuple[Tensor, Callable[[], None]]:
        target = buffers[index % 2][: parts[index].numel()]
        return target, start_copy(target, parts[index])

    present = begin(0)
    for following in range(1, len(parts) + 1):
        target, wait = present
        if following < len(parts):
            present = begin(following)
        wait()
        yield from target.split(size)


def _page_locked(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _start_copy(target: Tensor, source: Tensor) -> Callable[[], None]:
    target.copy_(source, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(source.device))
    return event.synchronize


_ROW = 512  # integers of 8 bytes
CHUNK = 256 * _ROW * 8  # bytes that are processed at a time: 1 MiB, which stays in a core's cache


def checksum(tensor: Tensor) -> int:
    """Compute 32 bits from a tensor's bytes, at more than half the speed at which memory can be read.

    Each chunk of 1 MiB is a table of 8-byte integers, 512 in a row. The result is the CRC-32 of the sums of its rows
    and of its columns, and of the bytes after the last whole row. It detects any change of one integer, and any
    swap of rows, columns or parts of them. A change that keeps all sums takes at least four integers. A CRC-32 of all
    bytes takes three times as long.
    """
    running = 0
    for chunk in host_chunks(tensor, CHUNK):
        running = add_to_checksum(running, chunk.numpy())
    return running


def checksum_in_file(file: int, begin: int, size: int) -> int:
    """Compute `checksum` for `size` bytes from `begin` in an open file, or for fewer if the file ends earlier."""
    buffer, running, end = np.empty(min(size, CHUNK), dtype=np.uint8), 0, begin + size
    while begin < end:
        chunk = buffer[: min(end - begin, CHUNK)]
        read = read_at(file, begin, chunk.data)
        running = add_to_checksum(running, chunk[:read])
        begin = begin + read if read == chunk.size else end
    return running


def read_at(file: int, position: int, buffer: memoryview) -> int:
    """Fill `buffer` from an open file; return the number of bytes, which is smaller only if the file ends."""
    filled = 0
    while filled < len(buffer):
        read = os.preadv(file, [buffer[filled:]], position + filled)
        if not read:
            break
        filled += read
    return filled


def checksum_of(value: Any) -> int:
    """Compute the checksum of a value whose `repr` describes it completely."""
    return zlib.crc32(repr(value).encode())


def add_to_checksum(running: int, data: np.ndarray) -> int:
    """Add `data`, at most one chunk, to a running checksum; only the last chunk of a tensor may be smaller."""
    whole = data.size - data.size % (_ROW * 8)
    if whole:
        table = data[:whole].view(np.uint64).reshape(-1, _ROW)
        for axis in (1, 0):
            running = zlib.crc32(table.sum(axis=axis, dtype=np.uint64).data, running)
    return zlib.crc32(data[whole:].data, running)
