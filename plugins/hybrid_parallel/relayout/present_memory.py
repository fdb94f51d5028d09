"""The memory of the present state, given back piece by piece while it moves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from plugins.hybrid_parallel.checkpoint.state.global_tensor import GlobalTensor
from plugins.hybrid_parallel.zero.bucket import Bucket
from shardformer.utils.freed_memory import FreedMemory


class PresentMemory:
    """Storages of the present weights and optimizer states, each of which is emptied after its last tensor has moved.

    Objects that still refer to an emptied storage cannot be used any more.

    Args:
        held: the rectangles that this rank has, by name.
        freed: names of tensors that are read once; a storage with others is kept. Also an attribute.
        buckets: of the present optimizers.
    """

    def __init__(self, held: Mapping[str, GlobalTensor], freed: Collection[str], buckets: Sequence[Bucket]) -> None:
        self.freed = frozenset(freed)
        self._names: dict[int, set[str]] = defaultdict(set)  # address of a storage -> what it holds
        for name, tensor in held.items():
            for storage in _storages(tensor):
                self._names[storage.data_ptr()].add(name)
        self._kept = {address for address, names in self._names.items() if not names <= self.freed}
        self._flats = [bucket.flat if bucket.sharded is None else bucket.sharded.shard for bucket in buckets]
        self._releases: dict[int, Callable[[], None]] = {
            flat.untyped_storage().data_ptr(): partial(bucket.options.exchange.release, flat)
            for flat, bucket in zip(self._flats, buckets, strict=True)
            if bucket.sharded is None or bucket.options.exchange.shard_file is None
        }
        self._freed = FreedMemory(sum(tensor.nbytes for tensor in self._flats))

    def release_copies(self) -> None:
        """Empty the buckets whose weights other replicas send."""
        for flat in self._flats:
            if flat.untyped_storage().data_ptr() not in self._names:
                self._empty(flat.untyped_storage())

    def release(self, name: str, tensor: GlobalTensor) -> None:
        """Note that a tensor has moved; empty the storages that hold nothing else."""
        for storage in _storages(tensor):
            left = self._names[storage.data_ptr()]
            left.discard(name)
            if not left and storage.data_ptr() not in self._kept:
                self._empty(storage)

    def _empty(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if storage.resizable():
            size = storage.nbytes()
            storage.resize_(0)
            self._freed.add(size)
        elif address in self._releases:  # memory that the ranks of a machine share
            self._releases.pop(address)()


def _storages(tensor: GlobalTensor) -> list[torch.UntypedStorage]:
    values: list[Tensor] = [each.values for each in tensor.rectangles]
    found = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in values}
    return [storage for address, storage in found.items() if address]
