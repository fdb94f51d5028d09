"""Count the bytes that a rank holds at its fullest moment in training, tensor by tensor.

Parameters, masters and buffers are there before; what operators create is counted by a dispatch mode, what ZeRO gathers
by the present size of its storages, and buffers of gradients in shared memory by the largest gradients that have been
in them. Memory that kernels take and give back inside of one operator is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from torch import Tensor

from benchmarks.live_bytes import LiveBytes
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.zero.comm.collectives import SharedMemoryCollectives
from plugins.hybrid_parallel.zero.grad_buffer_pool import GradBufferPool
from zoo_tests.harness.measured_memory import memory_of, sharded_members


class CountedBytes(LiveBytes):
    """Dispatch mode that counts the bytes of a boosted model in training.

    Args:
        model: the model, before its first step.
    """

    def __init__(self, model: HybridParallelModel) -> None:
        super().__init__()
        held = memory_of(model)
        self._base = held.parameters + held.masters + held.buffers
        self._members = sharded_members(model)
        self._touched: dict[int, int] = {}  # address of a buffer -> bytes of the most that has been in it
        self.highest = self._base

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.look()
        return result

    def look(self) -> None:
        """Count what is alive now."""
        gathered = sum(member.flat.untyped_storage().nbytes() for member in self._members)
        self.highest = max(self.highest, self._base + self.bytes + gathered + sum(self._touched.values()))

    def take(self, pool: GradBufferPool, size: int, *rest: Any, native: Callable[..., Tensor]) -> Tensor:
        """Count a buffer of gradients."""
        flat = native(pool, size, *rest)
        if isinstance(pool._exchange, SharedMemoryCollectives):
            place = flat.data_ptr()
            self._touched[place] = max(self._touched.get(place, 0), flat.nbytes)
        return flat

    def trim(self, pool: GradBufferPool, count: int, native: Callable[..., None]) -> None:
        """Forget buffers that a pool has released."""
        before = {buffer.data_ptr() for buffer in pool._free}
        native(pool, count)
        for place in before - {buffer.data_ptr() for buffer in pool._free}:
            self._touched.pop(place, None)


def highest_bytes(model: HybridParallelModel, steps: Iterable[Callable[[], object]]) -> int:
    """Run training steps and return the most bytes that were alive at once.

    Args:
        model: the boosted model, before its first step.
        steps: the steps, at least two: states exist from the second on.
    """
    counted = CountedBytes(model)
    take, trim = GradBufferPool.take, GradBufferPool.trim
    with ExitStack() as stack:
        stack.enter_context(
            patch.object(GradBufferPool, "take", lambda pool, *args: counted.take(pool, *args, native=take))
        )
        stack.enter_context(patch.object(GradBufferPool, "trim", lambda pool, count: counted.trim(pool, count, trim)))
        stack.enter_context(counted)
        for step in steps:
            step()
            counted.look()
    return counted.highest
