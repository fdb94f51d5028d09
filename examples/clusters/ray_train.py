"""Ray Train: `TorchTrainer` starts the ranks and their process group, and starts them again when a worker has failed.

python examples/clusters/ray_train.py --workers 2 --tp 2 --storage /shared/runs     # a folder that all nodes mount
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from booster import Booster, launch_from_torch
from plugins.hybrid_parallel import HybridParallelPlugin

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

try:
    import ray.train
    from ray.train import (
        Checkpoint,
        CheckpointConfig,
        CheckpointUploadMode,
        FailureConfig,
        RunConfig,
        ScalingConfig,
    )
    from ray.train.torch import TorchTrainer
except ImportError as error:
    raise SystemExit(f"error: {error}; install or upgrade Ray Train with pip install --upgrade 'ray[train]'") from None

ROWS, LENGTH = 4, 16
NAME = "train"


def train_loop(config: dict[str, Any]) -> None:
    """What each worker runs."""
    launch_from_torch(seed=7)  # Ray's process group is used as it is
    booster = Booster(plugin=HybridParallelPlugin(tp_size=config["tp"], max_norm=1.0))
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replicas = torch.distributed.get_world_size() // config["tp"]
    loader = DataLoader(samples(config["steps"] * ROWS), batch_size=ROWS // replicas)
    model, optimizer, loader = booster.boost(model, optimizer, loader)
    state = {"model": model, "optimizer": optimizer, "dataloader": loader}

    losses: list[float] = []
    if (newest := ray.train.get_checkpoint()) is not None:
        losses = booster.load_checkpoint(newest.path, **state)["losses"]
    batches = iter(loader)
    for step in range(len(losses) + 1, config["steps"] + 1):
        losses.append(booster.execute_pipeline(batches, model, optimizer=optimizer).loss.item())
        optimizer.step()
        optimizer.zero_grad()
        # All ranks write into one folder, and rank 0 reports it; Ray need not copy what is in its storage already.
        folder = Path(config["storage"], NAME, f"step-{step}")
        booster.save_checkpoint(folder, **state, losses=losses)
        report({"loss": losses[-1], "losses": losses}, folder)


def report(metrics: dict[str, Any], folder: Path) -> None:
    """Report a checkpoint; all workers must call this."""
    is_first = ray.train.get_context().get_world_rank() == 0
    ray.train.report(
        metrics,
        checkpoint=Checkpoint(str(folder)) if is_first else None,
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(128, (LENGTH,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer_of(
    loop: Callable[[dict[str, Any]], None], workers: int, tp: int, steps: int, storage: Path
) -> TorchTrainer:
    """Ray's trainer, which starts the loop again from the newest reported checkpoint when a worker has failed."""
    return TorchTrainer(
        loop,
        train_loop_config={"tp": tp, "steps": steps, "storage": str(storage)},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            name=NAME,
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--storage", type=Path, required=True, help="a folder that all nodes mount")
    options = parser.parse_args()
    result = trainer_of(train_loop, options.workers, options.tp, options.steps, options.storage).fit()
    print("loss", result.metrics["loss"], "in", result.checkpoint.path)


if __name__ == "__main__":
    main()
