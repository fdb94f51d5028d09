"""The collectives of ZeRO over flat buffers: reduce-scatter of gradients, all-gather of parameters and of shards.

`ZeroCollectives` is their interface, and does them by the backend's own implementation. Between CPUs those of gloo are
slow: its reduce-scatter is an all-reduce of a copy that discards all but one shard. The other files of this folder have
faster ones, and `exchange_of` chooses; nothing else knows which are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plugins.hybrid_parallel.zero.bucket_layout import StateMemory
from shardformer.distributed.collectives import all_gather_flat, reduce_scatter_flat


class ZeroCollectives:
    """ZeRO collectives by the backend's own implementation.

    Attributes:
        shard_memory: memory of the shards of parameters if they are offloaded, else None.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.shard_memory: StateMemory | None = None

    def keep_shards_in(self, memory: StateMemory) -> None:
        """Have `empty_shard` allocate in other memory from now on; must be called on all ranks."""
        self.shard_memory = memory

    def empty_shard(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros of shape [count] for a shard that `gather_shard` gathers; must be called on all ranks."""
        return (self.shard_memory or self).empty(count, dtype, device).zero_()

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized memory of shape [count] for data to exchange."""
        return torch.empty(count, dtype=dtype, device=device)

    def release(self, tensor: Tensor) -> None:
        """Release memory from `empty` that no rank uses any more."""

    def reduce_scatter(self, flat: Tensor, shard: Tensor) -> ReduceScatterHandle:
        """Sum `flat`, [ranks * shard], unchanged until all are done, over ranks to this one's `shard`, [shard]."""
        return ReduceScatterHandle(shard, [reduce_scatter_flat(shard, flat, group=self.group, async_op=True)])

    def all_gather(self, flat: Tensor, is_copied: bool = False) -> AllGatherHandle:
        """Fill `flat`, [ranks * shard], with every rank's shard; `is_copied`: a shard may change after `wait`."""
        own = flat.view(dist.get_world_size(self.group), -1)[dist.get_rank(self.group)]
        return AllGatherHandle([all_gather_flat(flat, own, group=self.group, async_op=True)])

    # ----- shards that stay where they are: the parameters of ZeRO stage 3 -----

    @property
    def gathers_ahead(self) -> bool:
        """Whether a `gather_shard` that has started proceeds while this rank computes."""
        return dist.get_world_size(self.group) > 1

    def gather_shard(self, shard: Tensor, flat: Tensor) -> AllGatherHandle:
        """Start to fill `flat`, [ranks * shard], with the shards of all ranks; `shard` is from `empty_shard`."""
        if dist.get_world_size(self.group) == 1:
            flat.copy_(shard, non_blocking=True)
            return AllGatherHandle()
        shard = shard.to(flat.device, non_blocking=True)
        return AllGatherHandle([all_gather_flat(flat, shard, group=self.group, async_op=True)])

    def begin_update(self) -> None:
        """Wait until no other rank reads the present values of this rank's shards any more."""

    def end_update(self) -> None:
        """Tell the other ranks that the new values of this rank's shards are complete."""

    def await_update(self) -> None:
        """Wait until the new values of all ranks' shards are complete."""


class ReduceScatterHandle:
    """Handle of a reduce-scatter in progress."""

    def __init__(self, shard: Tensor, works: Sequence[Any] = ()) -> None:
        self.shard, self._works = shard, works

    def wait(self) -> Tensor:
        """Wait for the sum over the ranks and return it, [shard]."""
        for work in self._works:
            work.wait()
        return self.shard

    def mark_done(self, is_finite: bool | None) -> None:
        """Mark this rank as done reading peers' buffers; report whether its shard is finite."""

    def wait_all_done(self) -> bool | None:
        """Wait until all ranks are done; return whether the whole sum is finite, None if no rank knows."""
        return None


class AllGatherHandle:
    """Handle of an all-gather in progress."""

    def __init__(self, works: Sequence[Any] = ()) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait until all shards have arrived."""
        for work in self._works:
            work.wait()
        self._works = ()

    def close(self) -> None:
        """Wait until the other ranks have this rank's shard, so that it may be changed."""
        self.wait()
