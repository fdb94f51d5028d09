"""A job that loses one of two machines at each change of its layout, and goes on from the memory of the other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from booster import Booster
from booster.elastic.job_environment import VARIABLE, ElasticPlace
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Recipe
from zoo_tests.hybrid_parallel.relayout.chain import GLOBAL_BATCH, LAYOUTS, Objects, Rows, boosted

_NAMES = ("model", "optimizer", "lr_scheduler", "dataloader")


def train(recipe: Recipe, layouts: Sequence[str], folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train one step under each layout; return the losses and the whole weights at the end."""
    losses: list[float] = []
    machine = dist.get_rank() // 2
    memory = Path(folder) / f"machine-{machine}"
    for round_, layout in enumerate(layouts, start=1):
        (memory / "pieces").mkdir(parents=True, exist_ok=True)
        place = ElasticPlace(str(memory), 4, 4, round_)
        with patch.dict(os.environ, {VARIABLE: place.to_json(), "GROUP_RANK": str(machine)}):
            booster, objects = boosted(recipe, layout, {}) if round_ == 1 else _next(recipe, layout, folder)
            model, optimizer, scheduler, loader = objects
            for batch in loader:
                losses.append(float(booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss))
                break
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            booster.snapshot(folder, **dict(zip(_NAMES, objects, strict=True)), round=round_)
        dist.barrier()
        if dist.get_rank() == 2 * (round_ % 2):
            shutil.rmtree(memory)
        dist.barrier()
    whole = booster.plugin.checkpoint_io.whole_state_dict(objects[0])
    return losses, {name: torch.as_tensor(value) for name, value in whole.items()}


def _next(recipe: Recipe, layout: str, folder: str) -> tuple[Booster, Objects]:
    """A fresh job, whose replicas are first given other numbers of samples."""
    precision = "fp32" if recipe.precision == "fp64" else recipe.precision
    plugin = HybridParallelPlugin(**LAYOUTS[layout], precision=precision, max_norm=1.0, seed=5)
    booster, model = Booster(plugin=plugin), recipe.model()
    optimizer, scheduler = recipe.training(model)
    objects = booster.boost(model, optimizer, scheduler, DataLoader(Rows(recipe), batch_size=4, shuffle=True))
    assert booster.latest_checkpoint(folder).startswith("memory:")
    booster.load_checkpoint(folder, **dict(zip(_NAMES, objects, strict=True)), resume="latest")
    assert objects[3].global_batch_size == GLOBAL_BATCH
    return booster, objects
