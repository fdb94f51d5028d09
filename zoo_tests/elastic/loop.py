"""The loop of the elastic jobs: it appends each step's loss, and the processes of ranks, to files.

With `JOB_SAVE_EVERY` and `JOB_RELAYOUT_EVERY`, numbers of steps, it also saves checkpoints on disk and changes its
layout. The file `marks` says which rank is inside of which of them: [rank, round, name, whether it is over,
time].
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin

GLOBAL_BATCH = 12
SAVE, RELAYOUT = "save", "relayout"
_KINDS = ("model", "optimizer", "lr_scheduler", "dataloader")
_SEED = 3


def new_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer of the jobs, and its schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)


def layouts_or(usual: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The layouts in `JOB_LAYOUTS`, else the usual ones."""
    return json.loads(os.environ["JOB_LAYOUTS"]) if "JOB_LAYOUTS" in os.environ else usual


def train(
    layouts: Sequence[dict[str, Any]],
    model: nn.Module,
    criterion: Callable[..., Any] | None,
    samples: list[Any],
    folder: Path,
    steps: int,
    least_s: float,
) -> None:
    """Train from where the job was before, under the first layout, and under the others in turn."""
    _append(folder / "pids", [_round(), dist.get_rank(), os.getpid()])
    plugin = HybridParallelPlugin(**layouts[0], seed=_SEED)
    booster = Booster(plugin=plugin)
    optimizer, scheduler = new_optimizer(model)
    loader = DataLoader(samples, batch_size=GLOBAL_BATCH // plugin.dp_size, shuffle=criterion is None)
    objects = booster.boost(model, optimizer, scheduler, loader)
    step = changes = 0
    if booster.latest_checkpoint(folder):
        step = booster.load_checkpoint(folder, **_by_kind(objects), resume="latest")["step"]
    while step < steps:
        for batch in objects[3]:
            began = time.monotonic()
            loss = _step(booster, objects, batch, criterion)
            step += 1
            if dist.get_rank() == 0:
                _append(folder / "losses", [step, loss, dist.get_world_size()])
            if _is_due("JOB_SAVE_EVERY", step):
                with _marked(folder, SAVE):
                    booster.save_checkpoint(folder / f"step-{step}", **_by_kind(objects), step=step, keep_last=2)
            booster.snapshot(folder, **_by_kind(objects), step=step)
            time.sleep(max(0.0, least_s - (time.monotonic() - began)))
            if step == steps:
                break
            if _is_due("JOB_RELAYOUT_EVERY", step):
                changes += 1
                with _marked(folder, RELAYOUT):
                    plugin = HybridParallelPlugin(**layouts[changes % len(layouts)], seed=_SEED)
                    objects = booster.relayout(plugin, *objects)
                break


def _step(booster: Booster, objects: Sequence[Any], batch: Any, criterion: Callable[..., Any] | None) -> float:
    model, optimizer, scheduler, _ = objects
    loss = booster.execute_pipeline(iter([batch]), model, criterion, optimizer=optimizer).loss.item()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss


def _by_kind(objects: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(_KINDS, objects, strict=True))


def _is_due(variable: str, step: int) -> bool:
    every = int(os.environ.get(variable, "0"))
    return every > 0 and step % every == 0


def _round() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextmanager
def _marked(folder: Path, name: str) -> Iterator[None]:
    _append(folder / "marks", [dist.get_rank(), _round(), name, False, time.time()])
    yield
    _append(folder / "marks", [dist.get_rank(), _round(), name, True, time.time()])


def _append(path: Path, line: list[Any]) -> None:
    with open(path, "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")
