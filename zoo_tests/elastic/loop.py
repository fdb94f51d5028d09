"""The loop of the elastic jobs: it appends each step's loss, and the processes of ranks, to files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin

GLOBAL_BATCH = 12


def new_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer of the jobs, and its schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)


def train(
    plugin: HybridParallelPlugin,
    model: nn.Module,
    criterion: Callable[..., Any] | None,
    samples: list[Any],
    folder: Path,
    steps: int,
    least_s: float,
) -> None:
    """Train from where the job was before."""
    _append(folder / "pids", [int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), dist.get_rank(), os.getpid()])
    booster = Booster(plugin=plugin)
    optimizer, scheduler = new_optimizer(model)
    loader = DataLoader(samples, batch_size=GLOBAL_BATCH // plugin.dp_size, shuffle=criterion is None)
    model, optimizer, scheduler, loader = booster.boost(model, optimizer, scheduler, loader)
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "dataloader": loader}
    step = 0
    if booster.latest_checkpoint(folder):
        step = booster.load_checkpoint(folder, **state, resume="latest")["step"]
    while step < steps:
        for batch in loader:
            began = time.monotonic()
            loss = booster.execute_pipeline(iter([batch]), model, criterion, optimizer=optimizer).loss.item()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if dist.get_rank() == 0:
                _append(folder / "losses", [step, loss, dist.get_world_size()])
            booster.snapshot(folder, **state, step=step)
            time.sleep(max(0.0, least_s - (time.monotonic() - began)))
            if step == steps:
                break


def _append(path: Path, line: list[Any]) -> None:
    with open(path, "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")
