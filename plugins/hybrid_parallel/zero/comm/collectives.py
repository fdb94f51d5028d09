"""The two collectives of ZeRO stage 1: reduce-scatter of gradients, all-gather of parameters, both over flat buffers.

NCCL has its own. gloo's reduce-scatter is an all-reduce of a copy, of which all but one shard is thrown away. Between
CPUs every rank therefore gets from each other rank the shard that is its own, and adds up what it gets: (p - 1) / p of
the buffer a rank instead of twice that, and no copy. On one machine it reads that shard in the other's memory
(`SharedMemoryCollectives`), else the other sends it (`P2PCollectives`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plugins.hybrid_parallel.zero.comm.local_peers import LocalPeers, meet_neighbours
from shardformer.distributed.collectives import all_gather_flat, reduce_scatter_flat

# What a number says that ranks tell each other.
_WRITTEN, _SUMMED, _UPDATED, _READ = range(4)
_TAGS = 2**20  # of messages that can be on their way
# What is mapped of another rank's memory at a time, in bytes: it counts as memory of both.
_WINDOW = 2**23
Answers = Callable[[], dict[int, int]]  # waits for the others' numbers; by rank


class ZeroCollectives:
    """By the backend's own collectives.

    Args:
        group: the ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[count], memory for what is exchanged, with any values."""
        return torch.empty(count, dtype=dtype, device=device)

    def release(self, tensor: Tensor) -> None:
        """What `empty` gave is no longer used, by any rank."""

    def reduce_scatter(self, flat: Tensor, shard: Tensor) -> ReduceScatterHandle:
        """Sum `flat` over the ranks; this rank's part of the sum goes to `shard`.

        Args:
            flat: [ranks * shard], not to be changed until the result is settled.
            shard: [shard], memory for the result.
        """
        return ReduceScatterHandle(shard, [reduce_scatter_flat(shard, flat, group=self.group, async_op=True)])

    def all_gather(self, flat: Tensor, is_copied: bool = False) -> AllGatherHandle:
        """Fill `flat`, [ranks * shard], of which each rank has its own shard in place.

        Args:
            is_copied: this rank's shard may be changed once `wait` is over, before all others have it.
        """
        own = flat.view(dist.get_world_size(self.group), -1)[dist.get_rank(self.group)]
        return AllGatherHandle([all_gather_flat(flat, own, group=self.group, async_op=True)])


class ReduceScatterHandle:
    """A reduce-scatter that was started.

    Args:
        shard: memory for the result.
        works: what to wait for.
    """

    def __init__(self, shard: Tensor, works: Sequence[Any] = ()) -> None:
        self.shard, self._works = shard, works

    def wait(self) -> Tensor:
        """The sum over the ranks, [shard]."""
        for work in self._works:
            work.wait()
        return self.shard

    def mark_done(self, is_finite: bool | None) -> None:
        """This rank has its result and needs nobody's summands any more; tells the others whether it is finite."""

    def wait_all_done(self) -> bool | None:
        """Wait until all ranks have settled; whether all of the sum is finite, None where nobody knows."""
        return None


class AllGatherHandle:
    """An all-gather that was started."""

    def __init__(self, works: Sequence[Any] = ()) -> None:
        self._works = works

    def wait(self) -> None:
        """Until all shards are here."""
        for work in self._works:
            work.wait()
        self._works = ()

    def close(self) -> None:
        """Until this rank's shard may be changed: the others have it."""
        self.wait()


class P2PCollectives(ZeroCollectives):
    """Between CPUs: every rank sends each other one what that one needs."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        self.rank, count = dist.get_rank(group), dist.get_world_size(group)
        # The next one first: not all turn to the same rank at once.
        self.others = [(self.rank + step) % count for step in range(1, count)]
        self._turns = 0

    def next_turn(self) -> int:
        """Which exchange of the group starts; all ranks start them in one order, and may wait for them in another."""
        self._turns += 1
        return self._turns

    def broadcast_number(self, turn: int, kind: int, number: int) -> Answers:
        """Tell all others a number; what comes back waits for theirs of the same turn and kind."""
        tag = _tag(turn, kind)
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
        rows = flat.view(len(self.others) + 1, -1)
        place = min(self.others)  # one of the first two summands, read in the moment in which the sum is written
        parts = {rank: shard if rank == place else torch.empty_like(shard) for rank in self.others}
        works = [dist.irecv(part, group=self.group, group_src=rank) for rank, part in parts.items()]
        works += [dist.isend(rows[rank], group=self.group, group_dst=rank) for rank in self.others]
        return _SentShard(self, shard, works, {**parts, self.rank: rows[self.rank]})

    def all_gather(self, flat: Tensor, is_copied: bool = False) -> AllGatherHandle:
        rows = flat.view(len(self.others) + 1, -1)
        works = [dist.irecv(rows[rank], group=self.group, group_src=rank) for rank in self.others]
        works += [dist.isend(rows[self.rank], group=self.group, group_dst=rank) for rank in self.others]
        return AllGatherHandle(works)


class _SentShard(ReduceScatterHandle):
    """One whose summands are sent.

    Args:
        parts: each rank's summand, by rank.
    """

    def __init__(self, exchange: P2PCollectives, shard: Tensor, works: Sequence[Any], parts: dict[int, Tensor]) -> None:
        super().__init__(shard, works)
        self._exchange, self._parts, self._turn = exchange, parts, exchange.next_turn()
        self._is_finite = True
        self._answers: Answers = dict

    def wait(self) -> Tensor:
        super().wait()
        _add_up(self._parts, self.shard)
        self._parts = {}
        return self.shard

    def mark_done(self, is_finite: bool | None) -> None:
        self._is_finite = bool(is_finite)
        self._answers = self._exchange.broadcast_number(self._turn, _SUMMED, int(self._is_finite))

    def wait_all_done(self) -> bool | None:
        return all(self._answers().values()) and self._is_finite


class SharedMemoryCollectives(P2PCollectives):
    """Between CPUs of one machine: every rank reads what it needs in the others' memory.

    Args:
        group: the ranks.
        neighbours: what they reach each other by.
    """

    def __init__(self, group: ProcessGroup, neighbours: LocalPeers) -> None:
        super().__init__(group)
        self.memory, self._neighbours = neighbours.memory, neighbours

    def broadcast_number(self, turn: int, kind: int, number: int) -> Answers:
        lines, tag = self._neighbours.lines, _tag(turn, kind)
        for rank in self.others:
            lines.send(rank, tag, number)
        return lambda: {rank: lines.receive(rank, tag) for rank in self.others}

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.memory.empty(count, dtype)

    def release(self, tensor: Tensor) -> None:
        self.memory.release(tensor)

    def read(
        self, rank: int, place: int, row: int, like: Tensor, is_kept: bool = False
    ) -> Iterator[tuple[slice, Tensor]]:
        """Row `row` of what starts at `place` of another rank's memory, in rows like this one, part by part."""
        count = like.numel()
        step = _WINDOW // like.element_size()
        memory, start = self._neighbours.memories[rank], place + row * count * like.element_size()
        for first in range(0, count, step):
            part = slice(first, min(first + step, count))
            address = start + first * like.element_size()
            yield part, memory.map_view(address, part.stop - first, like.dtype, is_kept and count <= step)

    def reduce_scatter(self, flat: Tensor, shard: Tensor) -> ReduceScatterHandle:
        return _ReadShard(self, flat, shard)

    def all_gather(self, flat: Tensor, is_copied: bool = False) -> AllGatherHandle:
        return _ReadGather(self, flat, is_copied)


class _ReadShard(_SentShard):
    """One whose summands are read where they were written."""

    def __init__(self, exchange: SharedMemoryCollectives, flat: Tensor, shard: Tensor) -> None:
        super().__init__(exchange, shard, [], {})
        self._own = flat.view(len(exchange.others) + 1, -1)[exchange.rank]
        self._places = exchange.broadcast_number(self._turn, _WRITTEN, exchange.memory.place(flat))

    def wait(self) -> Tensor:
        rank, places = self._exchange.rank, self._places()
        # Gradients take turns in the same memory.
        readers = [self._exchange.read(other, place, rank, self.shard, is_kept=True) for other, place in places.items()]
        for windows in zip(*readers, strict=True):
            part, _ = windows[0]
            theirs = {other: window for other, (_, window) in zip(places, windows, strict=True)}
            _add_up({rank: self._own[part], **theirs}, self.shard[part])
        return self.shard


class _ReadGather(AllGatherHandle):
    """One whose shards are read where they are, or in copies, which are let go of when all have read them."""

    def __init__(self, exchange: SharedMemoryCollectives, flat: Tensor, is_copied: bool) -> None:
        super().__init__()
        self._exchange, self._flat, self._turn = exchange, flat, exchange.next_turn()
        self._rows = flat.view(len(exchange.others) + 1, -1)
        self._copy: Tensor | None = None
        if is_copied:
            self._copy = exchange.memory.empty(self._rows.shape[1], flat.dtype)
            self._copy.copy_(self._rows[exchange.rank])
        told = flat if self._copy is None else self._copy
        self._places = exchange.broadcast_number(self._turn, _UPDATED, exchange.memory.place(told))
        self._answers: Answers | None = None

    def wait(self) -> None:
        if self._answers is not None:
            return
        for rank, place in self._places().items():
            row = rank if self._copy is None else 0
            for part, window in self._exchange.read(rank, place, row, self._rows[rank]):
                self._rows[rank][part].copy_(window)
        self._answers = self._exchange.broadcast_number(self._turn, _READ, 0)

    def close(self) -> None:
        self.wait()
        self._answers()
        if self._copy is not None:
            self._exchange.memory.release(self._copy)
            self._copy = None


def _add_up(parts: Mapping[int, Tensor], out: Tensor) -> None:
    """The sum of all ranks' parts, in the order of ranks, so that its bits do not depend on who adds."""
    first, second, *others = (part for _, part in sorted(parts.items()))
    torch.add(first, second, out=out)
    for part in others:
        out.add_(part)


def _tag(turn: int, kind: int) -> int:
    return turn % _TAGS * 4 + kind


def exchange_of(group: ProcessGroup, device: torch.device) -> ZeroCollectives:
    """The fastest way to exchange between these ranks; to be called on all of them."""
    uses_gloo = device.type == "cpu" and "gloo" in str(dist.get_backend_config(group))
    if not uses_gloo or dist.get_world_size(group) == 1:
        return ZeroCollectives(group)
    neighbours = meet_neighbours(group)
    return P2PCollectives(group) if neighbours is None else SharedMemoryCollectives(group, neighbours)
