"""The job without transformers, whose import takes longer than the test: replicas of a small classifier.

Arguments: folder, steps, seconds that each step takes at least.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from booster import launch_from_torch
from zoo_tests.elastic.loop import GLOBAL_BATCH, layouts_or, new_optimizer, train
from zoo_tests.harness.classifier import Classifier, loss_of

SAMPLES = 30  # two batches and a half
LAYOUTS = [{}, {"zero_stage": 3}, {"zero_stage": 2}]


def new_model() -> Classifier:
    torch.manual_seed(3)
    return Classifier().double()


def samples() -> list[dict[str, Tensor]]:
    rows = torch.randint(50, (SAMPLES, 7), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row.sum() % 2} for row in rows]


def plain_losses(steps: int) -> list[float]:
    """Losses of one process with plain torch."""
    model, rows = new_model(), samples()
    optimizer, scheduler = new_optimizer(model)
    losses: list[float] = []
    while len(losses) < steps:
        for start in range(0, SAMPLES, GLOBAL_BATCH):
            part = rows[start : start + GLOBAL_BATCH]
            batch = {name: torch.stack([row[name] for row in part]) for name in part[0]}
            loss = loss_of(model(batch["input_ids"]), batch)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses[:steps]


def main() -> None:
    """Train for a number of steps, from where the job was before."""
    launch_from_torch(seed=3)
    train(layouts_or(LAYOUTS), new_model(), loss_of, samples(), Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))


if __name__ == "__main__":
    main()
