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


def enter(backend: str = nccl.BACKEND) -> None:
    """Load the device and make the process groups of this rank those of `backend`, with the same ranks."""
    load()
    store, rank, world_size = c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    turn = store.add(f"simcuda-world-{rank}", 1)
    dist.destroy_process_group()
    store = dist.PrefixStore(f"simcuda-{turn}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
