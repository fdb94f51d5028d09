"""Which ranks are on one machine, and what they reach each other by."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from booster.failure.peers import machine
from plugins.hybrid_parallel.distributed.agreement import all_gather_json
from plugins.hybrid_parallel.zero.comm.shared_memory import PeerSegment, SharedSegment
from plugins.hybrid_parallel.zero.comm.signal_sockets import Listener, SignalSocket, SignalSockets, connect
from shardformer.distributed.collectives import world_timeout


@dataclass
class LocalPeers:
    """A group whose ranks are on one machine, as one of them sees it.

    Attributes:
        memory: this rank's memory, which the others can read.
        memories: the others', by rank of the group.
        lines: to the others.
    """

    memory: SharedSegment
    memories: dict[int, PeerSegment]
    lines: SignalSockets


def meet_neighbours(group: ProcessGroup) -> LocalPeers | None:
    """Make out whether all ranks of a group can read each other's memory; to be called on all of them.

    None, on all alike, where some cannot: on several machines, in containers that do not see each other's processes,
    on systems other than Linux.
    """
    memory = listener = None
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # forbidden by what the process is confined in
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
