"""A job that changes its layout while it runs, and the same job with a checkpoint saved and loaded at each change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.checkpoint import dcp_storage
from zoo_tests.harness.case import Recipe

GLOBAL_BATCH, INITIAL_SCALE = 8, 2.0**22
# Layouts of 4 ranks.
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4": {},
    "tp4": {"tp_size": 4},
    "tp2dp2": {"tp_size": 2, "zero_stage": 2},
    "pp2dp2": {"pp_size": 2, "num_microbatches": 2},
    "tp2pp2": {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "zero_stage": 0},
    "pp4": {"pp_size": 4, "num_microbatches": 4},
    "dp4 stage 3": {"zero_stage": 3},
    "cp2tp2": {"cp_size": 2, "tp_size": 2},
}


class Rows(Dataset):
    """The rows of a batch of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        batch = recipe.batch(0)
        self.rows = [{name: value[row] for name, value in batch.items()} for row in range(recipe.rows)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


Objects = tuple[Any, ...]


def boosted(recipe: Recipe, layout: str, options: dict[str, Any]) -> tuple[Booster, Objects]:
    """Boost a fresh model, its optimizer and scheduler, and a shuffling loader."""
    plugin = HybridParallelPlugin(**LAYOUTS[layout], **options, precision=_precision(recipe), max_norm=1.0, seed=5)
    model = recipe.model()
    optimizer, scheduler = recipe.training(model)
    booster = Booster(plugin=plugin)
    loader = DataLoader(Rows(recipe), batch_size=GLOBAL_BATCH // plugin.dp_size, shuffle=True)
    return booster, booster.boost(model, optimizer, scheduler, loader)


def moved(booster: Booster, objects: Objects, recipe: Recipe, layout: str, options: dict[str, Any]) -> Any:
    """Change the layout of the running job, in many rounds."""
    plugin = HybridParallelPlugin(**LAYOUTS[layout], **options, precision=_precision(recipe), max_norm=1.0, seed=5)
    with patch.object(dcp_storage, "_ROUND_BYTES", 2**12):
        return booster, booster.relayout(plugin, *objects)


def loaded(
    folder: str, booster: Booster, objects: Objects, recipe: Recipe, layout: str, options: dict[str, Any]
) -> Any:
    """Save a checkpoint, and load it into a fresh job under another layout."""
    names = ("model", "optimizer", "lr_scheduler", "dataloader")
    booster.save_checkpoint(folder, **dict(zip(names, objects, strict=True)))
    fresh, made = boosted(recipe, layout, options)
    fresh.load_checkpoint(folder, **dict(zip(names, made, strict=True)))
    return fresh, made


def train(
    recipe: Recipe, layouts: Sequence[str], options: dict[str, Any], folder: str | None
) -> tuple[list[float], dict[str, Tensor]]:
    """Train one step under each layout; return the losses and the whole weights at the end.

    Args:
        folder: of the checkpoints; None to change the layout of the running job.
    """
    change: Callable[..., Any] = moved if folder is None else lambda *given: loaded(str(Path(folder) / "state"), *given)
    losses: list[float] = []
    booster, objects = boosted(recipe, layouts[0], options)
    for layout in layouts:
        if losses:
            booster, objects = change(booster, objects, recipe, layout, options)
        model, optimizer, scheduler, loader = objects
        result = booster.execute_pipeline(iter([next(iter(loader))]), model, optimizer=optimizer)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(result.loss))
    whole = booster.plugin.checkpoint_io.whole_state_dict(objects[0])
    return losses, {name: torch.as_tensor(value) for name, value in whole.items()}


def scales(recipe: Recipe, before: str, after: str) -> list[dict[str, Any]]:
    """States of the loss scale: before and after the layout changes, one good step behind an overflow, and a step on.

    Two good steps double the scale.
    """
    options = {"initial_scale": INITIAL_SCALE, "growth_interval": 2}
    booster, objects = boosted(recipe, before, options)
    found: list[dict[str, Any]] = []

    def step() -> None:
        model, optimizer, _, loader = objects
        booster.execute_pipeline(iter([next(iter(loader))]), model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        found.append(optimizer.loss_scale.state_dict())

    while not found or found[-1]["good_steps"] != 1:
        step()
    booster, objects = moved(booster, objects, recipe, after, options)
    found.append(objects[1].loss_scale.state_dict())
    step()
    return found[-3:]


def _precision(recipe: Recipe) -> str:
    return "fp32" if recipe.precision == "fp64" else recipe.precision
