"""Saves in the background: a copy of the state is staged, and one save at a time is written."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from booster.checkpoint import SavedCheckpoint
from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.checkpoint.state.global_tensor import GlobalTensor, TensorChunk
from plugins.hybrid_parallel.checkpoint.state.training_state import StateSnapshot

_logger = get_logger(__name__)


class BackgroundWriter:
    """A single thread that completes saves; the interpreter waits for it at exit."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="booster-checkpoint")
        self._last: SavedCheckpoint | None = None

    def start(self, path: Path, began: float, work: Callable[[], None]) -> SavedCheckpoint:
        """Run `work` in the background; the previous save must have been finished."""

        def timed() -> float:
            work()
            return time.perf_counter() - began

        future = self._threads.submit(timed)
        future.add_done_callback(lambda done: _report(path, done))
        self._last = SavedCheckpoint(path, time.perf_counter() - began, future)
        return self._last

    def finish(self) -> None:
        """Wait for the save in progress, if any."""
        last, self._last = self._last, None
        if last is None or last.has_raised:
            return
        try:
            last.wait()
        except ConfigurationError as error:
            raise ConfigurationError(f"the asynchronous save of {last.path} failed: {error}") from error


def _report(path: Path, done: Future[float]) -> None:
    if done.exception() is not None:
        _logger.error("the checkpoint %s was not saved: %s", path, done.exception())
    else:
        _logger.info("the checkpoint %s was saved in %.2f s", path, done.result())


_ALIGNMENT = 64  # bytes


class Staging:
    """Host memory that is reused between saves, because allocating it takes longer than filling it."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def copy(self, snapshot: StateSnapshot) -> StateSnapshot:
        """Copy a snapshot into the staging memory, overwriting the previous one."""
        values = [part.values for tensor in snapshot.tensors.values() for part in tensor.rectangles]
        copies = iter(self._copies(values))
        tensors = {
            name: GlobalTensor(
                tensor.shape,
                tensor.dtype,
                [TensorChunk(part.offsets, part.sizes, next(copies)) for part in tensor.rectangles],
            )
            for name, tensor in snapshot.tensors.items()
        }
        return dataclasses.replace(snapshot, tensors=tensors)

    def _copies(self, values: Iterable[Tensor]) -> list[Tensor]:
        values = list(values)
        has_gpu = any(value.is_cuda for value in values)
        room = [-(-value.nbytes // _ALIGNMENT) * _ALIGNMENT for value in values]
        sizes, places = blocks_of_powers(room) if has_gpu else _one_block(room)
        present = [block.numel() for block in self._blocks]
        if len(sizes) > len(present) or any(size > there for size, there in zip(sizes, present, strict=False)):
            self._blocks = []  # free the old memory first
            self._blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=has_gpu) for size in sizes]
        copies = []
        for value, (block, start) in zip(values, places, strict=True):
            target = self._blocks[block][start : start + value.nbytes].view(value.dtype).view(value.shape)
            copies.append(target.copy_(value, non_blocking=True))
        if has_gpu:
            torch.cuda.current_stream().synchronize()
        return copies


def blocks_of_powers(room: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Distribute pieces over blocks of powers of two.

    torch allocates page-locked memory in powers of two: one block for everything would take up to twice its size.

    Args:
        room: bytes of each piece.

    Returns:
        The sizes of the blocks, and (block, offset) of each piece.
    """
    left = sorted(range(len(room)), key=lambda index: -room[index])
    sizes: list[int] = []
    places = [(0, 0)] * len(room)
    while left:
        total, largest = sum(room[index] for index in left), room[left[0]]
        # The largest power of two that the pieces fill, or the smallest that holds the largest piece.
        size = max(1 << max(total.bit_length() - 1, 0), 1 << max(largest - 1, 0).bit_length())
        used, rest = 0, []
        for index in left:
            if used + room[index] > size:
                rest.append(index)
                continue
            places[index] = (len(sizes), used)
            used += room[index]
        sizes.append(size)
        left = rest
    return sizes, places


def _one_block(room: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    starts = [0, *accumulate(room)]
    return [starts[-1]], [(0, start) for start in starts[:-1]]
