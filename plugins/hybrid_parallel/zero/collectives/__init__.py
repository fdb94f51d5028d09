"""Collectives of ZeRO, and the choice between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from booster.failure import peers
from plugins.hybrid_parallel.zero.collectives.backend import ZeroCollectives
from plugins.hybrid_parallel.zero.collectives.p2p import HierarchicalCollectives, P2PCollectives
from plugins.hybrid_parallel.zero.collectives.shared_memory import SharedMemoryCollectives, meet_neighbours
from shardformer.distributed.process_groups import all_gather_json


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
    """Return how many ranks each of `machines` (one entry a rank) has; 1 if that differs, or one has all."""
    count = next((rank for rank, name in enumerate(machines) if name != machines[0]), len(machines))
    blocks = [set(machines[start : start + count]) for start in range(0, len(machines), count)]
    is_regular = len(machines) % count == 0 and all(len(block) == 1 for block in blocks)
    is_apart = len(set(machines)) == len(blocks) > 1
    return count if is_regular and is_apart else 1
