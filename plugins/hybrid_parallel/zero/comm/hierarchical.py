"""ZeRO collectives between machines that have several ranks each: inside a machine first, then across.

Of ranks that exchange with each other directly, those of one machine each send their gradients to every rank of every
other machine. Summed inside the machine first, a value crosses the network once a machine instead of once a rank: with
n ranks a machine, an n-th of the traffic. The shards are the same ones, and no rank needs more memory for states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from booster.failure import peers
from plugins.hybrid_parallel.distributed.agreement import all_gather_json
from plugins.hybrid_parallel.zero.comm.collectives import (
    READ,
    UPDATED,
    WRITTEN,
    AllGatherHandle,
    P2PCollectives,
    SentShard,
    SharedMemoryCollectives,
    ZeroCollectives,
    add_up,
    tag_of,
)
from plugins.hybrid_parallel.zero.comm.local_peers import meet_neighbours


class HierarchicalCollectives(P2PCollectives):
    """ZeRO collectives between CPUs: the ranks of a machine follow one another, and each machine has as many.

    Args:
        group: the process group of the ranks.
        ranks_per_machine: number of ranks of each machine.
    """

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
        """Start to send tensors to the rank at a place of a machine, and to receive as many.

        Args:
            sent, arriving: [count, shard], of which rows are contiguous.
            tag: which messages of these two ranks belong together.
        """
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


def exchange_of(group: ProcessGroup, device: torch.device) -> ZeroCollectives:
    """Choose the fastest collectives for these ranks; must be called on all of them."""
    uses_gloo = device.type == "cpu" and "gloo" in str(dist.get_backend_config(group))
    if not uses_gloo or dist.get_world_size(group) == 1:
        return ZeroCollectives(group)
    neighbours = meet_neighbours(group)
    if neighbours is not None:
        return SharedMemoryCollectives(group, neighbours)
    per_machine = ranks_per_machine(all_gather_json(peers.machine(), group))
    return P2PCollectives(group) if per_machine == 1 else HierarchicalCollectives(group, per_machine)


def ranks_per_machine(machines: Sequence[str]) -> int:
    """Return how many neighbours each machine has; 1 if that differs, or there is one machine alone.

    Args:
        machines: the machine of each rank.
    """
    count = next((rank for rank, name in enumerate(machines) if name != machines[0]), len(machines))
    blocks = [set(machines[start : start + count]) for start in range(0, len(machines), count)]
    is_regular = len(machines) % count == 0 and all(len(block) == 1 for block in blocks)
    is_apart = len(set(machines)) == len(blocks) > 1
    return count if is_regular and is_apart else 1
