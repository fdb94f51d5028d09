"""HybridParallelCheckpointIO: how this plugin saves and loads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.checkpoint import write_text
from booster.errors import ConfigurationError
from booster.plugin import CheckpointIO
from plugins.hybrid_parallel.checkpoint.agree import together
from plugins.hybrid_parallel.checkpoint.model_files import load_model_files, save_model_files
from plugins.hybrid_parallel.checkpoint.optimizer_files import load_optimizer_files, save_optimizer_files
from plugins.hybrid_parallel.checkpoint.training_state import describe, load_random_state, save_random_state
from plugins.hybrid_parallel.mesh import AXES, HybridMesh


class HybridParallelCheckpointIO(CheckpointIO):
    """Saves and loads under any layout.

    Args:
        mesh: the grid of ranks.
    """

    def __init__(self, mesh: HybridMesh) -> None:
        self.mesh = mesh

    def save_model(
        self, model: nn.Module, directory: str, size_per_shard: str = "5GB", dtype: torch.dtype | None = None
    ) -> None:
        """Write a Hugging Face directory.

        Args:
            size_per_shard: upper limit of one file.
            dtype: of the weights in the files; None for that of the model.
        """
        _wait_for_parameters(model)
        save_model_files(model, self.mesh, Path(directory), size_per_shard, dtype)

    def load_model(self, model: nn.Module, directory: str, strict: bool = True) -> None:
        """Read a Hugging Face directory of the same model class."""
        _wait_for_parameters(model)
        load_model_files(model, Path(directory), strict)

    def save_optimizer(self, optimizer: torch.optim.Optimizer, directory: str) -> None:
        save_optimizer_files(optimizer, self.mesh, Path(directory))

    def load_optimizer(self, optimizer: torch.optim.Optimizer, directory: str) -> None:
        load_optimizer_files(optimizer, Path(directory))

    def save_checkpoint(self, directory: str, objects: dict[str, Any], extra: dict[str, Any]) -> None:
        """Write everything beside the old checkpoint, then let it take the old one's place."""
        final = Path(directory)
        partial = final.with_name(f"{final.name}.partial")
        description = describe(self.mesh, objects, extra)
        together(lambda: _empty(partial) if dist.get_rank() == 0 else None)
        model = objects.get("model")
        if model is not None:
            self.save_model(model, str(partial / "model"))
        if objects.get("optimizer") is not None:
            self.save_optimizer(objects["optimizer"], str(partial / "optimizer"))
        together(lambda: save_random_state(model, partial))

        def publish() -> None:
            if dist.get_rank() == 0:
                write_text(partial / "state.json", description)
                _take_the_place_of(partial, final)

        together(publish)

    def load_checkpoint(self, directory: str, objects: dict[str, Any]) -> dict[str, Any]:
        """Read a checkpoint; random states are taken over where the layout is the same."""
        path = Path(directory)
        together(lambda: _put_back(path) if dist.get_rank() == 0 else None)
        state = together(lambda: _read_state(path))
        model = objects.get("model")
        if model is not None:
            self.load_model(model, str(path / "model"))
        if objects.get("optimizer") is not None:
            self.load_optimizer(objects["optimizer"], str(path / "optimizer"))
        for kind in ("lr_scheduler", "dataloader"):
            if objects.get(kind) is not None and state[kind] is not None:
                objects[kind].load_state_dict(state[kind])
        if state["layout"] == {axis: self.mesh.size(axis) for axis in AXES}:
            together(lambda: load_random_state(model, path))
        return state["extra"]


def _wait_for_parameters(model: Any) -> None:
    for optimizer in model.optimizers:
        optimizer.wait_for_parameters()


def _put_back(path: Path) -> None:
    """Undo a save that was interrupted between its two renames: it has left the old checkpoint aside."""
    if not path.exists() and _aside(path).exists():
        os.replace(_aside(path), path)


def _read_state(path: Path) -> dict[str, Any]:
    if not (path / "state.json").is_file():
        raise ConfigurationError(f"{path} has no state.json; give a directory of save_checkpoint")
    return json.loads((path / "state.json").read_text())


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def _empty(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _take_the_place_of(new: Path, old: Path) -> None:
    if old.exists():
        shutil.rmtree(_aside(old), ignore_errors=True)
        os.replace(old, _aside(old))
    os.replace(new, old)
    shutil.rmtree(_aside(old), ignore_errors=True)
