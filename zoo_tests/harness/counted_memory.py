"""Count the bytes that a rank holds at its fullest moment in training, tensor by tensor.

Parameters, masters and buffers are there before; what operators create is counted by a dispatch mode, what ZeRO gathers
by the present size of its storages, and buffers of gradients in shared memory by the largest gradients that have been
in them. What is offloaded to a file counts from the operator that uses it to the call that gives its pages up. Memory
that kernels take and give back inside of one operator is not seen.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.live_bytes import LiveBytes
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.offload.stores import PagedFile
from plugins.hybrid_parallel.zero.bucket_layout import GradBufferPool
from plugins.hybrid_parallel.zero.collectives.shared_memory import SharedMemoryCollectives
from zoo_tests.harness.measured_memory import memory_of, sharded_members


class FilePages:
    """Bytes of tensors in files that are in memory now.

    Args:
        files: the files of this rank.
    """

    def __init__(self, files: Iterable[PagedFile]) -> None:
        self._files = list(files)
        self._places: set[int] = set()
        self._used: dict[int, int] = {}  # address of a tensor -> end of what is in memory, in bytes
        self.refresh()

    @property
    def bytes(self) -> int:
        """Bytes in memory."""
        return sum(self._used.values())

    def refresh(self) -> None:
        """Take note of new tensors."""
        self._places = {place for file in self._files for place in file._places}

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether memory is that of a file."""
        return storage.data_ptr() in self._places

    def use(self, func: Any, values: Any) -> None:
        """Note that an operator has used these tensors; a view reads nothing."""
        returns = func._schema.returns
        if returns and all(each.alias_info is not None and not each.alias_info.is_write for each in returns):
            return
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor) and self.holds(storage := leaf.untyped_storage()):
                place = storage.data_ptr()
                end = min(leaf.data_ptr() - place + leaf.numel() * leaf.itemsize, storage.nbytes())
                self._used[place] = max(self._used.get(place, 0), end)

    def page_out(self, tensor: Tensor) -> None:
        """Forget a tensor whose pages are given up."""
        self._used.pop(tensor.data_ptr(), None)


class CountedBytes(LiveBytes):
    """Dispatch mode that counts the bytes of a boosted model in training.

    Args:
        model: the model, before its first step.
    """

    def __init__(self, model: HybridParallelModel) -> None:
        super().__init__()
        self.files = FilePages(each for each in gc.get_objects() if type(each) is PagedFile)
        held = memory_of(model, leaves_out=self.files.holds)
        self._base = held.parameters + held.masters + held.buffers
        self._members = sharded_members(model)
        self._touched: dict[int, int] = {}  # address of a buffer -> bytes of the most that has been in it
        self.highest = self._base

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.files.use(func, (args, kwargs))
        self.look()
        return result

    def look(self) -> None:
        """Count what is alive now."""
        gathered = sum(member.flat.untyped_storage().nbytes() for member in self._members)
        self.highest = max(self.highest, self._base + self.bytes + gathered + self._outside)

    @property
    def _outside(self) -> int:
        """Bytes that no operator has allocated: buffers of gradients, and pages of files."""
        return sum(self._touched.values()) + self.files.bytes

    def take(self, pool: GradBufferPool, size: int, *rest: Any, native: Callable[..., Tensor]) -> Tensor:
        """Count a buffer of gradients."""
        flat = native(pool, size, *rest)
        if isinstance(pool._memory, SharedMemoryCollectives):
            place = flat.data_ptr()
            self._touched[place] = max(self._touched.get(place, 0), flat.nbytes)
        return flat

    def make(self, file: PagedFile, *rest: Any, native: Callable[..., Tensor]) -> Tensor:
        """Take note of a new tensor in a file."""
        tensor = native(file, *rest)
        self.files.refresh()
        return tensor

    def page_out(self, file: PagedFile, tensor: Tensor, native: Callable[..., None]) -> None:
        """Forget pages that are given up."""
        native(file, tensor)
        self.files.page_out(tensor)

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
    take, trim, make, page_out = GradBufferPool.take, GradBufferPool.trim, PagedFile.empty, PagedFile.page_out
    with ExitStack() as stack:
        stack.enter_context(
            patch.object(GradBufferPool, "take", lambda pool, *args: counted.take(pool, *args, native=take))
        )
        stack.enter_context(patch.object(GradBufferPool, "trim", lambda pool, count: counted.trim(pool, count, trim)))
        stack.enter_context(
            patch.object(PagedFile, "empty", lambda file, *args: counted.make(file, *args, native=make))
        )
        stack.enter_context(
            patch.object(PagedFile, "page_out", lambda file, tensor: counted.page_out(file, tensor, page_out))
        )
        stack.enter_context(counted)
        for step in steps:
            step()
            counted.look()
    return counted.highest
