"""A name for each round of an elastic job, which all of its ranks have and no earlier round had.

torchrun keeps one store for all rounds of a job, with the keys of ranks that are gone. `TORCHELASTIC_RESTART_COUNT`
does not tell rounds apart: an agent counts the failures of its own ranks alone, and machines that join or leave are no
failures at all.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_POLL_S = 0.05


def agree_on_round(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> str:
    """Return the name that rank 0 has given this round; all ranks of the round must call this.

    Each rank asks with a new number, so that an answer to an earlier holder of its rank is none to it.

    Raises:
        TimeoutError: a rank did not join within `timeout_s` seconds.
    """
    if rank == 0:
        return _answer(store, world_size, timeout_s)
    number = uuid.uuid4().hex
    store.set(f"asks/{rank}", number)
    answer = f"answer/{rank}/{number}"
    try:
        store.wait([answer], timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        raise TimeoutError(
            f"rank 0 did not join the job within timeout_s={timeout_s:g}; look at why, or give a longer time in "
            "launch_from_torch(timeout_s=...)"
        ) from None
    name = store.get(answer).decode()
    store.add(f"{name}/has_it", 1)
    return name


def _answer(store: dist.Store, world_size: int, timeout_s: float) -> str:
    """Answer all ranks, some of them more than once: the first number may be that of a rank that is gone."""
    name = uuid.uuid4().hex
    asks = [f"asks/{rank}" for rank in range(1, world_size)]
    answered: dict[int, str] = {}
    until = time.monotonic() + timeout_s
    while (num_ready := store.add(f"{name}/has_it", 0)) < world_size - 1:
        if time.monotonic() > until:
            raise TimeoutError(
                f"{world_size - 1 - num_ready} of {world_size} ranks did not join the job within "
                f"timeout_s={timeout_s:g}; look at why, or give a longer time in launch_from_torch(timeout_s=...)"
            )
        if store.check(asks):
            numbers = dict(enumerate((number.decode() for number in store.multi_get(asks)), start=1))
            fresh = {rank: number for rank, number in numbers.items() if answered.get(rank) != number}
            if fresh:
                store.multi_set([f"answer/{rank}/{number}" for rank, number in fresh.items()], [name] * len(fresh))
            answered |= fresh
        time.sleep(_POLL_S)
    return name
