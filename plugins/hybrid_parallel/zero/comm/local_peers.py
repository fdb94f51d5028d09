"""Detection of ranks on one machine, and the connections between them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from booster.failure.peers import machine
from plugins.hybrid_parallel.distributed.agreement import all_gather_json, raise_on_all_ranks
from plugins.hybrid_parallel.zero.comm.shared_memory import PeerSegment, SharedSegment
from plugins.hybrid_parallel.zero.comm.signal_sockets import Listener, SignalSocket, SignalSockets, connect
from shardformer.distributed.collectives import world_timeout


@dataclass
class LocalPeers:
    """One rank's connections in a group whose ranks are all on one machine.

    Attributes:
        memory: this rank's memory, which the other ranks can read.
        memories: rank of the group -> its memory.
        lines: sockets to the other ranks.
    """

    memory: SharedSegment
    memories: dict[int, PeerSegment]
    lines: SignalSockets


def open_segments(segment: SharedSegment, group: ProcessGroup) -> dict[int, PeerSegment]:
    """Open the other ranks' segments, rank of the group -> its memory; must be called on all of `meet_neighbours`."""
    there = all_gather_json((os.getpid(), segment.file, segment.token), group)
    own = dist.get_rank(group)
    # All wait until all are done: a rank that needs no memory closes its file.
    return raise_on_all_ranks(
        lambda: {rank: PeerSegment(*address) for rank, address in enumerate(there) if rank != own}, group
    )


def meet_neighbours(group: ProcessGroup) -> LocalPeers | None:
    """Connect the ranks of a group if all can read each other's memory; must be called on all of them.

    Returns None, on all ranks, if some cannot: on several machines, in containers that do not see each other's
    processes, or on systems other than Linux.
    """
    memory = listener = None
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            memory = SharedSegment()
            listener = Listener(memory.token)
    here = None if listener is None else (machine(), os.getpid(), memory.file, memory.token)
    there, own = all_gather_json(here, group), dist.get_rank(group)
    if None in there or len({address[0] for address in there}) > 1:
        return None
    memories, connections = {}, {}
    with contextlib.suppress(OSError, ValueError):
        for rank, (_, process, file, token) in enumerate(there):
            if rank == own:
                continue
            memory_there = PeerSegment(process, file, token)
            if rank < own:
                connections[rank] = connect(token, own)
            memories[rank] = memory_there
    if not all(all_gather_json(len(memories) == len(there) - 1, group)):
        return None
    timeout_s = world_timeout().total_seconds()
    connections |= listener.accept(len(there) - 1 - own, timeout_s)
    global_ranks = dist.get_process_group_ranks(group)
    lines = {rank: SignalSocket(connection, global_ranks[rank]) for rank, connection in connections.items()}
    return LocalPeers(memory, memories, SignalSockets(lines, timeout_s))
