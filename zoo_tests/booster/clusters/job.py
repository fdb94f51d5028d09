"""A training script that every engine starts: it goes on from its newest checkpoint, and a rank of it can be killed.

The global batch is the same on any number of ranks, so every layout has the losses of `plain_losses`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from booster import Booster, launch_from_torch
from booster.preemption import Preemption
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer import TPInfo
from zoo_tests.harness.classifier import Classifier, loss_of

STEPS, ROWS = 8, 4
SAMPLES = [
    {"input_ids": torch.arange(7) * index % 50, "labels": torch.tensor(index % 2)} for index in range(STEPS * ROWS)
]


def new_model() -> tuple[Classifier, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Classifier()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain_losses() -> list[float]:
    """The losses in one process, without this library."""
    model, optimizer = new_model()
    losses = []
    for batch in DataLoader(SAMPLES, batch_size=ROWS):
        loss = loss_of(model(**batch), batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dies-after", type=int, help="step after which the last rank kills itself, once")
    parser.add_argument("--waits-after", type=int, help="step after which all wait for more ranks")
    parser.add_argument("--notice-after", type=int, help="step after which all wait for a notice, once")
    options = parser.parse_args()
    preemption = Preemption(signal.SIGUSR1)
    options.folder.mkdir(exist_ok=True)
    launch_from_torch(timeout_s=60)
    losses, worlds = train(options, preemption)
    if len(losses) == STEPS and dist.get_rank() == 0:
        (options.folder / "result.json").write_text(json.dumps({"losses": losses, "worlds": worlds}))


def train(options: argparse.Namespace, preemption: Preemption) -> tuple[list[float], list[int]]:
    """Train from the newest checkpoint; return the loss of each step, and the number of ranks that took it."""
    folder, world_size = options.folder, dist.get_world_size()
    plugin = HybridParallelPlugin(
        tp_size=options.tp, tp_info=TPInfo().shard_col("hidden").shard_row("last") if options.tp > 1 else None
    )
    booster = Booster(plugin=plugin)
    model, optimizer = new_model()
    loader = DataLoader(SAMPLES, batch_size=ROWS * options.tp // world_size)
    model, optimizer, _, loader = booster.boost(model, optimizer, loss_of, loader)
    state = {"model": model, "optimizer": optimizer, "dataloader": loader}
    losses, worlds = [], []
    if booster.latest_checkpoint(folder):
        extras = booster.load_checkpoint(folder, **state, resume="latest")
        losses, worlds = extras["losses"], extras["worlds"]
    batches = iter(loader)
    for _ in range(len(losses), STEPS):
        losses.append(booster.execute_pipeline(batches, model, optimizer=optimizer).loss.item())
        worlds.append(world_size)
        optimizer.step()
        optimizer.zero_grad()
        booster.save_checkpoint(folder / f"step-{len(losses)}", **state, losses=losses, worlds=worlds, keep_last=2)
        _disturb(options, len(losses), preemption)
        if preemption.is_announced():
            break
    return losses, worlds


def _disturb(options: argparse.Namespace, step: int, preemption: Preemption) -> None:
    marker = options.folder / "disturbed"
    if step == options.dies_after and not marker.exists():
        dist.barrier()
        if dist.get_rank() == dist.get_world_size() - 1:
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    if step == options.notice_after and not marker.exists():
        dist.barrier()
        marker.touch()
        until = time.monotonic() + 60
        while not preemption.is_announced() and time.monotonic() < until:
            time.sleep(0.05)
    if step == options.waits_after and dist.get_world_size() == 1:
        (options.folder / "waiting").touch()
        time.sleep(60)
        sys.exit("no further machine came")


if __name__ == "__main__":
    main()
