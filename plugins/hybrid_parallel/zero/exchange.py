"""The two collectives of ZeRO stage 1: reduce-scatter of gradients, all-gather of parameters, both over flat buffers.

gloo's reduce-scatter is an all-reduce of a copy, of which all but one shard is thrown away. Between CPUs every rank
therefore sends each other rank the shard that is that one's, and adds up what it gets: (p - 1) / p of the buffer a rank
instead of twice that, and no copy. NCCL has its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardformer.collectives import all_gather_flat, reduce_scatter_flat


class PendingShard:
    """A reduce-scatter that was started.

    Args:
        shard: the result, once it was waited for.
        works: what to wait for.
        parts: each rank's summand, by rank, one of them in `shard`; empty where the backend adds by itself.
    """

    def __init__(self, shard: Tensor, works: list[Any], parts: list[Tensor]) -> None:
        self.shard, self._works, self._parts = shard, works, parts

    def wait(self) -> Tensor:
        """The sum over the ranks, [shard]: added in the order of ranks, so that its bits do not depend on the owner."""
        for work in self._works:
            work.wait()
        if self._parts:
            first, second, *others = self._parts
            torch.add(first, second, out=self.shard)
            for part in others:
                self.shard.add_(part)
        self._parts = []
        return self.shard


class PendingGather:
    """An all-gather that was started."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Until all shards are here."""
        for work in self._works:
            work.wait()


def start_reduce_scatter(flat: Tensor, shard: Tensor, group: ProcessGroup) -> PendingShard:
    """Sum `flat` over the ranks; this rank's part of the sum goes to `shard`.

    Args:
        flat: [ranks * shard], not to be changed until the result is there.
        shard: [shard], memory for the result.
    """
    if not _sends_directly(flat, group):
        return PendingShard(shard, [reduce_scatter_flat(shard, flat, group=group, async_op=True)], [])
    own, others = _ranks(group)
    rows = flat.view(len(others) + 1, -1)
    place = min(others)  # one of the first two summands, which are read in the moment in which the sum is written
    parts = [shard if rank == place else torch.empty_like(shard) for rank in others]
    works = [dist.irecv(part, group=group, group_src=rank) for rank, part in zip(others, parts, strict=True)]
    works += [dist.isend(rows[rank], group=group, group_dst=rank) for rank in others]
    summands = [*zip(others, parts, strict=True), (own, rows[own])]
    return PendingShard(shard, works, [part for _, part in sorted(summands, key=lambda item: item[0])])


def start_all_gather(flat: Tensor, group: ProcessGroup) -> PendingGather:
    """Fill `flat`, [ranks * shard], of which each rank has its own shard in place."""
    own, others = _ranks(group)
    rows = flat.view(len(others) + 1, -1)
    if not _sends_directly(flat, group):
        return PendingGather([all_gather_flat(flat, rows[own], group=group, async_op=True)])
    works = [dist.irecv(rows[rank], group=group, group_src=rank) for rank in others]
    return PendingGather(works + [dist.isend(rows[own], group=group, group_dst=rank) for rank in others])


class GradientMemory:
    """Memory of buckets whose gradients were reduced, for buckets whose gradients are still to come.

    Fresh memory of a CPU costs as much time as a copy: its pages are filled with zeros. A GPU's has torch's own cache.

    Args:
        unit: least number of bytes of a buffer, so that buckets of about one size can take each other's.
    """

    def __init__(self, unit: int = 0) -> None:
        self._unit = unit
        self._free: list[Tensor] = []

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[size], with any values."""
        if device.type != "cpu":
            return torch.empty(size, dtype=dtype, device=device)
        fits = [buffer for buffer in self._free if buffer.dtype == dtype and buffer.numel() >= size]
        if not fits:
            return torch.empty(max(size, self._unit // dtype.itemsize), dtype=dtype)[:size]
        smallest = min(fits, key=Tensor.numel)
        self._free = [buffer for buffer in self._free if buffer is not smallest]
        return smallest[:size]

    def give(self, flat: Tensor) -> None:
        """Take back what `take` gave."""
        if flat.device.type == "cpu":
            whole = flat._base
            self._free.append(flat if whole is None else whole)

    def clear(self) -> None:
        """Let go of everything."""
        self._free.clear()


def _sends_directly(flat: Tensor, group: ProcessGroup) -> bool:
    return flat.device.type == "cpu" and "gloo" in str(dist.get_backend_config(group))


def _ranks(group: ProcessGroup) -> tuple[int, list[int]]:
    """This rank of the group, and the others, the next one first: not all send to the same one at once."""
    own, count = dist.get_rank(group), dist.get_world_size(group)
    return own, [(own + step) % count for step in range(1, count)]
