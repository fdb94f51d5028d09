"""The GPUs of this machine, as devices of the ranks of a pool."""

from __future__ import annotations

import os
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zoo_tests.harness.ranks import DEVICE_VARIABLE
from zoo_tests.harness.world import join_world

BACKEND = "cpu:gloo,cuda:nccl"
GPU, SIMULATED = "gpu", "simcuda"
_sharing = ExitStack()  # open until this process ends


def problem() -> str | None:
    """Why there is no GPU to use, in a sentence; None if there is one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"no GPU can be used: torch {torch.__version__} was built without CUDA; install the build for your GPU"
    return f"no GPU can be used: torch {torch.__version__} finds none; check the driver with nvidia-smi"


def chosen() -> str | None:
    """The device of these tests: that of `pytest --device`, or the GPU that there is."""
    asked = os.environ.get(DEVICE_VARIABLE)
    if asked is None:
        return None if problem() else GPU
    return asked if asked in (GPU, SIMULATED) else None


def capability() -> tuple[int, int]:
    """The compute capability of the device; the simulated one stands for a Hopper GPU."""
    return torch.cuda.get_device_capability() if chosen() == GPU else (9, 0)


def are_shared(world_size: int) -> bool:
    """Whether so many ranks have to share a GPU."""
    return chosen() == GPU and torch.cuda.device_count() < world_size


def enter() -> None:
    """Give this rank a GPU, and a world of NCCL, or of gloo where all ranks share the first GPU."""
    from torch._dynamo import config

    rank, world_size = dist.get_rank(), dist.get_world_size()
    config.disable = False  # other tests turn the compiler off
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # products then have the same bits from run to run
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if torch.cuda.device_count() < world_size:
        from zoo_tests.gpu.staging import shared_gpu

        _sharing.enter_context(shared_gpu())
        torch.cuda.set_device(0)
    else:
        torch.cuda.set_device(rank)
    join_world(BACKEND, c10d._get_default_store(), rank, world_size)
