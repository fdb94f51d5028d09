"""Puts the simulated device into this process."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zoo_tests.harness.world import join_world
from zoo_tests.simcuda import nccl, rules, runtime, torch_cuda

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
        # It looks for a real device when peft imports it; as if it were not installed.
        sys.modules.setdefault("bitsandbytes", None)
        nccl.install(_library)
        runtime.listeners.append(rules.refuse_races)
        rules.apply()
    return nccl.BACKEND


def enter() -> None:
    """Load the device, and give the process groups of this rank to it; of several devices, rank n takes number n."""
    load()
    torch_cuda.set_device(dist.get_rank() % torch_cuda.device_count())
    join_world(nccl.BACKEND, c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
