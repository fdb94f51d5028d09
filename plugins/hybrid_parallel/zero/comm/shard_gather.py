"""Repeated all-gathers of shards that stay where they are: the parameters of ZeRO stage 3."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from plugins.hybrid_parallel.zero.comm.collectives import (
    READ,
    UPDATED,
    AllGatherHandle,
    Answers,
    P2PCollectives,
    SharedMemoryCollectives,
    ZeroCollectives,
)
from shardformer.distributed.collectives import all_gather_flat


class ShardGather:
    """All-gather of one shard of every rank by the backend's own implementation.

    Args:
        exchange: the collectives of the ranks.
        shard: [shard], this rank's shard, which stays in its memory.

    Attributes:
        proceeds: whether a gather that has started proceeds while this rank computes.
    """

    proceeds = True

    def __init__(self, exchange: ZeroCollectives, shard: Tensor) -> None:
        self.exchange, self.shard = exchange, shard

    def start(self, flat: Tensor) -> AllGatherHandle:
        """Start to fill `flat`, [ranks * shard], with the shards of all ranks."""
        shard = self.shard.to(flat.device, non_blocking=True)
        return AllGatherHandle([all_gather_flat(flat, shard, group=self.exchange.group, async_op=True)])

    def read_ahead(self) -> None:
        """Start to bring this rank's shard near, if it is in a file."""
        if self.exchange.shard_file is not None:
            self.exchange.shard_file.read_ahead(self.shard)

    def page_out(self) -> None:
        """Let this rank's shard go until it is used again, if it is in a file."""
        if self.exchange.shard_file is not None:
            self.exchange.shard_file.page_out(self.shard)


class _OwnShard(ShardGather):
    """Gather of a single shard, which is the whole."""

    proceeds = False

    def start(self, flat: Tensor) -> AllGatherHandle:
        flat.copy_(self.shard, non_blocking=True)
        return AllGatherHandle()


class _SentShards(ShardGather):
    """All-gather between CPUs: every rank sends its shard to each other rank."""

    exchange: P2PCollectives

    def start(self, flat: Tensor) -> AllGatherHandle:
        flat.view(len(self.exchange.others) + 1, -1)[self.exchange.rank].copy_(self.shard)
        return self.exchange.all_gather(flat)


class _ReadShards(ShardGather):
    """All-gather on one machine: every rank reads the others' shards, whose places it asks for once."""

    exchange: SharedMemoryCollectives
    proceeds = False

    def __init__(self, exchange: SharedMemoryCollectives, shard: Tensor) -> None:
        super().__init__(exchange, shard)
        place = exchange.shard_segment.place(shard)
        self._places = exchange.broadcast_number(exchange.next_turn(), UPDATED, place)()

    def start(self, flat: Tensor) -> AllGatherHandle:
        return _ReadRows(self, flat)

    def read(self, flat: Tensor) -> None:
        """Copy the shards of all ranks."""
        rows = flat.view(len(self.exchange.others) + 1, -1)
        rows[self.exchange.rank].copy_(self.shard)
        for rank, place in self._places.items():
            for part, window in self.exchange.read_shard(rank, place, rows[rank]):
                rows[rank][part].copy_(window)


class _ReadRows(AllGatherHandle):
    """Handle of a gather that reads when it is waited for: there is nothing that could run meanwhile."""

    def __init__(self, gather: _ReadShards, flat: Tensor) -> None:
        super().__init__()
        self._gather, self._flat = gather, flat

    def wait(self) -> None:
        self._gather.read(self._flat)


class ShardUpdates:
    """Keeps updates of shards apart from gathers of them, where other ranks read them without a message.

    Args:
        exchange: the collectives of the ranks.
    """

    def __init__(self, exchange: ZeroCollectives) -> None:
        self._exchange = exchange if isinstance(exchange, SharedMemoryCollectives) else None
        self._answers: Answers | None = None

    def begin(self) -> None:
        """Wait until no other rank reads the present values any more."""
        if self._exchange is not None:
            self.wait()
            self._exchange.broadcast_number(self._exchange.next_turn(), READ, 0)()

    def end(self) -> None:
        """Tell the other ranks that the new values are complete."""
        if self._exchange is not None:
            self._answers = self._exchange.broadcast_number(self._exchange.next_turn(), UPDATED, 0)

    def wait(self) -> None:
        """Wait until the new values of all ranks are complete."""
        if self._answers is not None:
            self._answers()
            self._answers = None


def shard_gather(exchange: ZeroCollectives, shard: Tensor) -> ShardGather:
    """Return the fastest all-gather of `shard`, which is from `exchange.empty_shard`; must be called on all ranks."""
    if isinstance(exchange, SharedMemoryCollectives):
        return _ReadShards(exchange, shard)
    if dist.get_world_size(exchange.group) == 1:
        return _OwnShard(exchange, shard)
    kind = _SentShards if isinstance(exchange, P2PCollectives) else ShardGather
    return kind(exchange, shard)
