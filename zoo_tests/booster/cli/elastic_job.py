"""A training script that torchrun restarts: it goes on from the newest checkpoint, and one rank kills itself once."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from booster import Booster, launch_from_torch
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.classifier import Classifier, loss_of

SAMPLES, EPOCHS = 14, 3


def main() -> None:
    """Arguments: folder, step after which the last rank dies."""
    launch_from_torch()
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    losses = train(Path(sys.argv[1]), int(sys.argv[2]) if restarts == 0 else 0)
    if dist.get_rank() == 0:
        (Path(sys.argv[1]) / "losses.json").write_text(json.dumps({"losses": losses, "restarts": restarts}))


def train(folder: Path, dies_after: int) -> list[float]:
    """Train from the newest checkpoint in `folder`; the last rank dies after that step (0: never)."""
    torch.manual_seed(3)
    booster = Booster(plugin=HybridParallelPlugin(num_microbatches=2, seed=3))
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = [
        {"input_ids": torch.arange(7) * index % 50, "labels": torch.tensor(index % 2)} for index in range(SAMPLES)
    ]
    loader = DataLoader(samples, batch_size=2, shuffle=True)
    model, optimizer, _, loader = booster.boost(model, optimizer, loss_of, loader)
    state, losses = {"model": model, "optimizer": optimizer, "dataloader": loader}, []
    if booster.latest_checkpoint(folder):
        losses = booster.load_checkpoint(folder, **state, resume="latest")["losses"]
    for _ in range(loader.epoch, EPOCHS):
        batches = iter(loader)
        for _ in range(loader.position, len(loader)):
            losses.append(booster.execute_pipeline(batches, model, optimizer=optimizer).loss.item())
            optimizer.step()
            optimizer.zero_grad()
            booster.save_checkpoint(folder / f"step-{len(losses)}", **state, losses=losses, keep_last=2)
            if len(losses) == dies_after:
                dist.barrier()
                if dist.get_rank() == dist.get_world_size() - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
    return losses


if __name__ == "__main__":
    main()
