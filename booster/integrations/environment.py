"""torchrun's environment variables, for libraries that read them, in a job that was started by other means."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from shardformer.distributed.process_groups import world_group


@contextmanager
def variables_of_this_rank() -> Iterator[None]:
    """Set `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE` by the process group, unless all of them are set.

    All ranks call it.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    known = {name: os.environ.get(name) for name in names}
    missing = torch.tensor(int(None in known.values()))
    dist.all_reduce(missing, dist.ReduceOp.MAX, group=world_group())
    if not missing:
        yield
        return
    rank, machines = dist.get_rank(), _machines()
    here = [each for each, machine in enumerate(machines) if machine == machines[rank]]
    values = (rank, len(machines), here.index(rank), len(here))
    os.environ.update({name: str(value) for name, value in zip(names, values, strict=True)})
    try:
        yield
    finally:
        for name, value in known.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _machines() -> list[int]:
    """Return a number of the machine of each rank."""
    own = torch.tensor(zlib.crc32(socket.gethostname().encode()))
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own, group=world_group())
    return [int(each) for each in found]
