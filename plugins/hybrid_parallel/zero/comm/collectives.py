"""The two collectives of ZeRO stage 1 over flat buffers: reduce-scatter of gradients, all-gather of parameters.

NCCL implements both. gloo's reduce-scatter is an all-reduce of a copy that discards all but one shard. Between CPUs,
every rank therefore fetches its own shard from each other rank and sums the shards: (p - 1) / p of the buffer per rank
instead of twice that, and no copy. On one machine a rank reads the shard from the other rank's memory
(`SharedMemoryCollectives`), otherwise the other rank sends it (`P2PCollectives`, and `hierarchical.py` where machines
have several ranks each).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plugins.hybrid_parallel.zero.comm.local_peers import LocalPeers, PeerSegment, SharedSegment, open_segments
from shardformer.distributed.collectives import all_gather_flat, reduce_scatter_flat

# Meanings of the numbers that ranks send each other.
WRITTEN, SUMMED, UPDATED, READ = range(4)
_TAGS = 2**20  # turns whose messages may be in flight
# Bytes of another rank's memory that are mapped at a time: they count as memory of both processes.
_WINDOW = 2**23
Answers = Callable[[], dict[int, int]]  # waits for the numbers of the other ranks; returns them by rank


class ZeroCollectives:
    """ZeRO collectives by the backend's own implementation.

    Args:
        group: the process group of the ranks.

    Attributes:
        shard_file: where shards are that `shard_gather` gathers; None for memory from `empty`.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.shard_file: SharedSegment | None = None

    def keep_shards_in(self, file: SharedSegment) -> None:
        """Have `empty_shard` allocate in a file from now on; must be called on all ranks."""
        self.shard_file = file

    def empty_shard(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of shape [count] for a shard that `shard_gather` gathers; see `keep_shards_in`."""
        file = self.shard_file
        return self.empty(count, dtype, device) if file is None else file.empty(count, dtype)

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized memory of shape [count] for data to exchange."""
        return torch.empty(count, dtype=dtype, device=device)

    def release(self, tensor: Tensor) -> None:
        """Release memory from `empty` that no rank uses any more."""

    def reduce_scatter(self, flat: Tensor, shard: Tensor) -> ReduceScatterHandle:
        """Sum `flat` over the ranks; write this rank's shard of the sum to `shard`.

        Args:
            flat: [ranks * shard], must not change until all ranks are done.
            shard: [shard], memory for the result.
        """
        return ReduceScatterHandle(shard, [reduce_scatter_flat(shard, flat, group=self.group, async_op=True)])

    def all_gather(self, flat: Tensor, is_copied: bool = False) -> AllGatherHandle:
        """Fill `flat`, [ranks * shard], in which each rank has its own shard in place.

        Args:
            is_copied: whether this rank may change its shard after `wait`, before all other ranks have it.
        """
        own = flat.view(dist.get_world_size(self.group), -1)[dist.get_rank(self.group)]
        return AllGatherHandle([all_gather_flat(flat, own, group=self.group, async_op=True)])


class ReduceScatterHandle:
    """Handle of a reduce-scatter in progress.

    Args:
        shard: memory for the result.
        works: works to wait for.
    """

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


class P2PCollectives(ZeroCollectives):
    """ZeRO collectives between CPUs: every rank sends each other rank the shard that it needs."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        self.rank, count = dist.get_rank(group), dist.get_world_size(group)
        # Start with the next rank, so that not all ranks address the same one first.
        self.others = [(self.rank + step) % count for step in range(1, count)]
        self._turns = 0

    def next_turn(self) -> int:
        """Return the number of the next exchange; all ranks start them in one order, but may wait in another."""
        self._turns += 1
        return self._turns

    def broadcast_number(self, turn: int, kind: int, number: int) -> Answers:
        """Send a number to all other ranks; the returned function waits for theirs of the same turn and kind."""
        tag = tag_of(turn, kind)
        answers = [torch.zeros(1, dtype=torch.int64) for _ in self.others]
        works = [
            dist.irecv(answer, group=self.group, group_src=rank, tag=tag)
            for rank, answer in zip(self.others, answers, strict=True)
        ]
        message = torch.tensor([number])
        works += [dist.isend(message, group=self.group, group_dst=rank, tag=tag) for rank in self.others]

        def wait() -> dict[int, int]:
            for work in works:
                work.wait()
            return {rank: int(answer) for rank, answer in zip(self.others, answers, strict=True)}

        return wait

    def reduce_scatter(self, flat: Tensor, shard: Tensor) -> ReduceScatterHandle:
        """Start sending the summands to the ranks that sum them; see `ZeroCollectives`."""
        rows = flat.view(len(self.others) + 1, -1)
        place = min(self.others)  # one of the first two summands, which are read as the sum is written
        parts = {rank: shard if rank == place else torch.empty_like(shard) for rank in self.others}
        works = [dist.irecv(part, group=self.group, group_src=rank) for rank, part in parts.items()]
        works += [dist.isend(rows[rank], group=self.group, group_dst=rank) for rank in self.others]
        return SentShard(self, shard, works, {**parts, self.rank: rows[self.rank]})

    def all_gather(self, flat: Tensor, is_copied: bool = False) -> AllGatherHandle:
        """Start sending this rank's shard to all other ranks; see `ZeroCollectives`."""
        rows = flat.view(len(self.others) + 1, -1)
        works = [dist.irecv(rows[rank], group=self.group, group_src=rank) for rank in self.others]
        works += [dist.isend(rows[self.rank], group=self.group, group_dst=rank) for rank in self.others]
        return AllGatherHandle(works)


class SentShard(ReduceScatterHandle):
    """Handle of a reduce-scatter whose summands are sent.

    Args:
        parts: rank -> its summand.
    """

    def __init__(self, exchange: P2PCollectives, shard: Tensor, works: Sequence[Any], parts: dict[int, Tensor]) -> None:
        super().__init__(shard, works)
        self._exchange, self._parts, self._turn = exchange, parts, exchange.next_turn()
        self._is_finite = True
        self._answers: Answers = dict

    def wait(self) -> Tensor:
        """Wait for the summands and add them up; return the sum, [shard]."""
        super().wait()
        add_up(self._parts, self.shard)
        self._parts = {}
        return self.shard

    def mark_done(self, is_finite: bool | None) -> None:
        """Tell the other ranks whether this rank's shard is finite."""
        self._is_finite = bool(is_finite)
        self._answers = self._exchange.broadcast_number(self._turn, SUMMED, int(self._is_finite))

    def wait_all_done(self) -> bool | None:
        """Wait for the other ranks; return whether the whole sum is finite."""
        return all(self._answers().values()) and self._is_finite


class SharedMemoryCollectives(P2PCollectives):
    """ZeRO collectives between CPUs of one machine: every rank reads what it needs from the others' memory.

    Args:
        group: the process group of the ranks.
        neighbours: memory of the other ranks and sockets to them.
    """

    def __init__(self, group: ProcessGroup, neighbours: LocalPeers) -> None:
        super().__init__(group)
        self.memory, self._neighbours = neighbours.memory, neighbours
        self._shard_files: Mapping[int, PeerSegment] = {}  # of the other ranks

    def keep_shards_in(self, file: SharedSegment) -> None:
        """Allocate shards in a file that the other ranks read; see `ZeroCollectives`."""
        super().keep_shards_in(file)
        self._shard_files = open_segments(file, self.group)

    @property
    def shard_segment(self) -> SharedSegment:
        """Memory that `empty_shard` allocates in."""
        return self.memory if self.shard_file is None else self.shard_file

    def read_shard(self, rank: int, place: int, like: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield windows of the shard at `place` in another rank's memory for shards."""
        memory = self._shard_files.get(rank, self._neighbours.memories[rank])
        return _windows(memory, place, like, False)

    def broadcast_number(self, turn: int, kind: int, number: int) -> Answers:
        """Send a number over the sockets between ranks of one machine; see `P2PCollectives`."""
        lines, tag = self._neighbours.lines, tag_of(turn, kind)
        for rank in self.others:
            lines.send(rank, tag, number)
        return lambda: {rank: lines.receive(rank, tag) for rank in self.others}

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized memory of shape [count] that the other ranks can read."""
        return self.memory.empty(count, dtype)

    def release(self, tensor: Tensor) -> None:
        """Release memory from `empty` that no rank uses any more."""
        self.memory.release(tensor)

    def read(
        self, rank: int, place: int, row: int, like: Tensor, is_kept: bool = False
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield windows of row `row` of the buffer at `place` in another rank's memory; rows are shaped like `like`."""
        start = place + row * like.numel() * like.element_size()
        return _windows(self._neighbours.memories[rank], start, like, is_kept)

    def reduce_scatter(self, flat: Tensor, shard: Tensor) -> ReduceScatterHandle:
        """Start a sum for which `wait` reads the other ranks' summands; see `ZeroCollectives`."""
        return _ReadShard(self, flat, shard)

    def all_gather(self, flat: Tensor, is_copied: bool = False) -> AllGatherHandle:
        """Start a gather for which `wait` reads the other ranks' shards; see `ZeroCollectives`."""
        return _ReadGather(self, flat, is_copied)


class _ReadShard(SentShard):
    """Handle of a reduce-scatter whose summands are read from the memory of the other ranks."""

    def __init__(self, exchange: SharedMemoryCollectives, flat: Tensor, shard: Tensor) -> None:
        super().__init__(exchange, shard, [], {})
        self._own = flat.view(len(exchange.others) + 1, -1)[exchange.rank]
        self._places = exchange.broadcast_number(self._turn, WRITTEN, exchange.memory.place(flat))

    def wait(self) -> Tensor:
        rank, places = self._exchange.rank, self._places()
        # Windows are kept: gradient buffers reuse the same memory.
        readers = [self._exchange.read(other, place, rank, self.shard, is_kept=True) for other, place in places.items()]
        for windows in zip(*readers, strict=True):
            part, _ = windows[0]
            theirs = {other: window for other, (_, window) in zip(places, windows, strict=True)}
            add_up({rank: self._own[part], **theirs}, self.shard[part])
        return self.shard


class _ReadGather(AllGatherHandle):
    """Handle of an all-gather that reads shards in place, or from copies that are released after all have read them."""

    def __init__(self, exchange: SharedMemoryCollectives, flat: Tensor, is_copied: bool) -> None:
        super().__init__()
        self._exchange, self._flat, self._turn = exchange, flat, exchange.next_turn()
        self._rows = flat.view(len(exchange.others) + 1, -1)
        self._copy: Tensor | None = None
        if is_copied:
            self._copy = exchange.memory.empty(self._rows.shape[1], flat.dtype)
            self._copy.copy_(self._rows[exchange.rank])
        told = flat if self._copy is None else self._copy
        self._places = exchange.broadcast_number(self._turn, UPDATED, exchange.memory.place(told))
        self._answers: Answers | None = None

    def wait(self) -> None:
        if self._answers is not None:
            return
        for rank, place in self._places().items():
            row = rank if self._copy is None else 0
            for part, window in self._exchange.read(rank, place, row, self._rows[rank]):
                self._rows[rank][part].copy_(window)
        self._answers = self._exchange.broadcast_number(self._turn, READ, 0)

    def close(self) -> None:
        self.wait()
        self._answers()
        if self._copy is not None:
            self._exchange.memory.release(self._copy)
            self._copy = None


def _windows(memory: PeerSegment, start: int, like: Tensor, is_kept: bool) -> Iterator[tuple[slice, Tensor]]:
    """Yield windows of the values at `start` of another rank's memory, as many as `like` has."""
    count, step = like.numel(), _WINDOW // like.element_size()
    for first in range(0, count, step):
        part = slice(first, min(first + step, count))
        address = start + first * like.element_size()
        yield part, memory.map_view(address, part.stop - first, like.dtype, is_kept and count <= step)


def add_up(parts: Mapping[int, Tensor], out: Tensor) -> None:
    """Sum all parts into `out` in rank order, so that the bits do not depend on the rank that adds."""
    first, second, *others = (part for _, part in sorted(parts.items()))
    torch.add(first, second, out=out)
    for part in others:
        out.add_(part)


def tag_of(turn: int, kind: int) -> int:
    """Return the tag of a rank's messages of one kind in one exchange."""
    return turn % _TAGS * 4 + kind
