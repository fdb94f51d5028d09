"""Puts the simulated device into this process."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zoo_tests.harness.world import join_world
from zoo_tests.simcuda import gpu_operators, nccl, rules, runtime, torch_cuda

_libraries: list[torch.library.Library] = []


def load() -> str:
    """Make `cuda:0` the simulated device, before anything has used CUDA in this process.

    Returns:
        The backend of process groups: gloo for CPU tensors, the rules of NCCL for those of the device.

    Raises:
        RuntimeError: its library could not be built.
    """
    if runtime.load_library():
        _libraries[:] = (torch.library.Library(name, "IMPL") for name in ("c10d", "aten"))
        collectives, operators = _libraries
        torch_cuda.install()
        # It looks for a real device when peft imports it; as if it were not installed.
        sys.modules.setdefault("bitsandbytes", None)
        nccl.install(collectives)
        gpu_operators.install(operators)
        runtime.listeners.append(rules.refuse_races)
        rules.apply()
    return nccl.BACKEND


def enter() -> None:
    """Load the device, and give the process groups of this rank to it; of several devices, rank n takes number n."""
    load()
    torch_cuda.set_device(dist.get_rank() % torch_cuda.device_count())
    join_world(nccl.BACKEND, c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
