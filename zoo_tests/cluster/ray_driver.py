"""Trains under several layouts on the Ray cluster that runs on this machine: `ray_driver.py FOLDER NAME...`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from booster import launch_from_torch
from zoo_tests.cluster.parity_job import train


def loop(config: dict[str, Any]) -> None:
    """What every worker runs."""
    torch.set_num_threads(1)
    launch_from_torch()
    train(Path(config["folder"]), config["names"])


def main() -> None:
    ray.init(address="auto", log_to_driver=False)
    trainer = TorchTrainer(
        loop,
        train_loop_config={"folder": sys.argv[1], "names": sys.argv[2:]},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=4, placement_strategy="SPREAD"),
        run_config=RunConfig(name="job", storage_path=sys.argv[1]),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
