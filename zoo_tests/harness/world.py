"""Another world for ranks that have one already."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

_TIMEOUT = timedelta(seconds=60)


def join_world(backend: str, store: dist.Store, rank: int, world_size: int) -> None:
    """Replace the world, if there is one; every call of a rank is the same on all ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    turn = store.add(f"zoo-tests-world-{rank}", 1)
    store = dist.PrefixStore(f"zoo-tests-{turn}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
