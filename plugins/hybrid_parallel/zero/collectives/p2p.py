"""ZeRO collectives between CPUs whose ranks send each other what they need.

Every rank sends each other rank the shard that this one sums: (p - 1) / p of the buffer per rank instead of the two
buffers of an all-reduce, and no copy.

Of ranks that exchange with each other directly, those of one machine each send their gradients to every rank of every
other machine. Summed inside the machine first, a value crosses the network once a machine instead of once a rank: with
n ranks a machine, an n-th of the traffic. The shards are the same ones, and no rank needs more memory for states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plugins.hybrid_parallel.zero.collectives.backend import AllGatherHandle, ReduceScatterHandle, ZeroCollectives

# Meanings of the numbers that ranks send each other.
WRITTEN, SUMMED, UPDATED, READ = range(4)
_TAGS = 2**20  # turns whose messages may be in flight
Answers = Callable[[], dict[int, int]]  # waits for the numbers of the other ranks; returns them by rank


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

    def gather_shard(self, shard: Tensor, flat: Tensor) -> AllGatherHandle:
        """Start sending this rank's shard to all other ranks; see `ZeroCollectives`."""
        flat.view(len(self.others) + 1, -1)[self.rank].copy_(shard)
        return self.all_gather(flat)


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


def add_up(parts: Mapping[int, Tensor], out: Tensor) -> None:
    """Sum all parts into `out` in rank order, so that the bits do not depend on the rank that adds."""
    first, second, *others = (part for _, part in sorted(parts.items()))
    torch.add(first, second, out=out)
    for part in others:
        out.add_(part)


def tag_of(turn: int, kind: int) -> int:
    """Return the tag of a rank's messages of one kind in one exchange."""
    return turn % _TAGS * 4 + kind


class HierarchicalCollectives(P2PCollectives):
    """ZeRO collectives between CPUs: the ranks of a machine follow one another, and each machine has as many."""

    def __init__(self, group: ProcessGroup, ranks_per_machine: int) -> None:
        super().__init__(group)
        self.per_machine = ranks_per_machine
        self.num_machines = dist.get_world_size(group) // ranks_per_machine
        self.machine, self.place = divmod(self.rank, ranks_per_machine)
        # Start with the next one, so that not all address the same one first.
        self.near = [(self.place + step) % self.per_machine for step in range(1, self.per_machine)]
        self.far = [(self.machine + step) % self.num_machines for step in range(1, self.num_machines)]
        self._halfway: deque[HierarchicalShard | HierarchicalGather] = deque()  # second half not started, oldest first

    def rows(self, flat: Tensor) -> Tensor:
        """Return a flat buffer as [machines, ranks of a machine, shard]."""
        return flat.view(self.num_machines, self.per_machine, -1)

    def exchange(self, machine: int, place: int, sent: Tensor, arriving: Tensor, tag: int) -> list[Any]:
        """Exchange `sent` for `arriving`, [count, shard], rows contiguous, with a machine's rank; `tag`: of both."""
        group, other = self.group, machine * self.per_machine + place
        works: list[Any] = [dist.irecv(row, group_src=other, group=group, tag=tag) for row in arriving]
        return works + [dist.isend(row, group_dst=other, group=group, tag=tag) for row in sent]

    def reduce_scatter(self, flat: Tensor, shard: Tensor) -> HierarchicalShard:
        """Start sending the summands to the ranks of this machine; see `ZeroCollectives`."""
        self.start_second_halves()  # they proceed while the first half of this one does
        handle = HierarchicalShard(self, flat, shard)
        self._halfway.append(handle)
        return handle

    def all_gather(self, flat: Tensor, is_copied: bool = False) -> AllGatherHandle:
        """Start sending this rank's shard to the same place of all machines; see `ZeroCollectives`."""
        handle = HierarchicalGather(self, flat)
        self._halfway.append(handle)
        return handle

    def start_second_halves(self, last: HierarchicalShard | HierarchicalGather | None = None) -> None:
        """Start the second halves of all exchanges up to `last` in the order in which they began, on all ranks.

        A rank may wait for a later exchange first, while another rank waits for its part of an earlier one.
        """
        while self._halfway and (last is None or last in self._halfway):
            self._halfway.popleft().start_second_half()


class HierarchicalShard(SentShard):
    """Handle of a reduce-scatter: what the ranks of a machine have summed is sent to the other machines."""

    def __init__(self, exchange: HierarchicalCollectives, flat: Tensor, shard: Tensor) -> None:
        rows = exchange.rows(flat)
        # What this rank sums: the shards of its place on all machines.
        parts = {place: rows.new_empty(exchange.num_machines, shard.numel()) for place in exchange.near}
        super().__init__(exchange, shard, [], {**parts, exchange.place: rows[:, exchange.place]})
        self._hierarchy, tag = exchange, tag_of(self._turn, WRITTEN)
        self._works = [
            work
            for place, part in parts.items()
            for work in exchange.exchange(exchange.machine, place, rows[:, place], part, tag)
        ]

    def start_second_half(self) -> None:
        """Wait for the ranks of this machine, and start sending their sums to the other machines."""
        exchange, tag = self._hierarchy, tag_of(self._turn, UPDATED)
        for work in self._works:
            work.wait()
        sums = torch.empty_like(self._parts[exchange.near[0]])  # [machines, shard]
        add_up(self._parts, sums)
        place = min(exchange.far)  # one of the first two summands, which are read as the sum is written
        parts = {machine: self.shard if machine == place else torch.empty_like(self.shard) for machine in exchange.far}
        self._works = [
            work
            for machine, part in parts.items()
            for work in exchange.exchange(machine, exchange.place, sums[machine : machine + 1], part[None], tag)
        ]
        self._parts = {**parts, exchange.machine: sums[exchange.machine]}

    def wait(self) -> Tensor:
        """Wait for the sum over the ranks and return it, [shard]."""
        self._hierarchy.start_second_halves(self)
        return super().wait()


class HierarchicalGather(AllGatherHandle):
    """Handle of an all-gather: shards of other machines arrive at one rank of this one, which passes them on."""

    def __init__(self, exchange: HierarchicalCollectives, flat: Tensor) -> None:
        self._exchange, self._rows, self._turn = exchange, exchange.rows(flat), exchange.next_turn()
        own, tag = self._rows[exchange.machine, exchange.place], tag_of(self._turn, UPDATED)
        works = [
            work
            for machine in exchange.far
            for work in exchange.exchange(
                machine, exchange.place, own[None], self._rows[machine, exchange.place][None], tag
            )
        ]
        super().__init__(works)

    def start_second_half(self) -> None:
        """Wait for the other machines, and start passing on what has arrived."""
        exchange, tag = self._exchange, tag_of(self._turn, READ)
        super().wait()
        self._works = [
            work
            for place in exchange.near
            for work in exchange.exchange(
                exchange.machine, place, self._rows[:, exchange.place], self._rows[:, place], tag
            )
        ]

    def wait(self) -> None:
        """Wait until all shards have arrived."""
        self._exchange.start_second_halves(self)
        super().wait()
