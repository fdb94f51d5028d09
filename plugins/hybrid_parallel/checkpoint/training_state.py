"""What belongs to a whole training state beside model and optimizer: random numbers, loader, scheduler, extras."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.mesh import AXES, HybridMesh
from plugins.hybrid_parallel.model import HybridParallelModel


def save_random_state(model: HybridParallelModel | None, directory: Path) -> None:
    """Write this rank's random states: torch's, the model's stream, Python's."""
    states = {"torch_cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["torch_cuda"] = torch.cuda.get_rng_state()
    if model is not None and model.stream is not None:
        states |= {f"stream_{key}": value for key, value in model.stream.state_dict().items()}
    version, words, gauss = random.getstate()
    states["python"] = torch.tensor(words, dtype=torch.int64)
    metadata = {"python": json.dumps([version, gauss])}
    save_file(states, directory / f"random-rank{dist.get_rank()}.safetensors", metadata=metadata)


def load_random_state(model: HybridParallelModel | None, directory: Path) -> None:
    """Read what `save_random_state` wrote on this rank."""
    states = load_file(directory / f"random-rank{dist.get_rank()}.safetensors")
    torch.set_rng_state(states["torch_cpu"])
    if "torch_cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["torch_cuda"])
    if model is not None and model.stream is not None:
        prefix = "stream_"
        model.stream.load_state_dict(
            {key.removeprefix(prefix): value for key, value in states.items() if key.startswith(prefix)}
        )
    random.setstate((3, tuple(states["python"].tolist()), None))


def describe(mesh: HybridMesh, objects: dict[str, Any], extra: dict[str, Any]) -> str:
    """`state.json`: layout, scheduler, loader position and extras.

    Raises:
        ConfigurationError: an extra, or the scheduler's state, holds something that JSON cannot.
    """
    scheduler, loader = objects.get("lr_scheduler"), objects.get("dataloader")
    state = {
        "layout": {axis: mesh.size(axis) for axis in AXES},
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "dataloader": None if loader is None else loader.state_dict(),
        "extra": extra,
    }
    try:
        return json.dumps(state)
    except TypeError as error:
        raise ConfigurationError(
            f"save_checkpoint cannot write its extras as JSON ({error}); give plain values"
        ) from None
