"""Puts the simulated device into this process."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zoo_tests.simcuda import nccl, rules, runtime, torch_cuda

_TIMEOUT = timedelta(seconds=60)
_library: torch.library.Library | None = None


def load() -> str:
    """Make `cuda:0` the simulated device, before anything has used CUDA in this process.

    Returns:
        The backend of process groups: gloo for CPU tensors, the rules of NCCL for those of the device.

    Raises:
        RuntimeError: its library could not be built.
    """
    global _library
    if runtime.load_library():
        _library = torch.library.Library("c10d", "IMPL")
        torch_cuda.install()
        nccl.install(_library)
        rules.apply()
    return nccl.BACKEND


def enter() -> None:
    """Load the device, and give the process groups of this rank to it."""
    load()
    join_world(nccl.BACKEND, c10d._get_default_store(), dist.get_rank(), dist.get_world_size())


def join_world(backend: str, store: dist.Store, rank: int, world_size: int) -> None:
    """Replace the world, if there is one; every call of a rank is the same on all ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    turn = store.add(f"simcuda-world-{rank}", 1)
    store = dist.PrefixStore(f"simcuda-{turn}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
