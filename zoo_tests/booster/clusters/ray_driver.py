"""A driver that the test starts: a small local Ray cluster trains by the example, and one of its workers is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch.distributed as dist
from ray_train import NAME, train_loop, trainer_of

from booster import Booster


def killed_once(config: dict[str, Any]) -> None:
    """The example's loop; the last worker is killed after its third checkpoint is on disk, before Ray knows of it."""
    marker = Path(config["storage"], "killed")
    save = Booster.save_checkpoint

    def save_and_die(self: Booster, folder: Path, **state: Any) -> None:
        save(self, folder, **state)
        if folder.name == "step-3" and not marker.exists():
            dist.barrier()
            if dist.get_rank() == dist.get_world_size() - 1:
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    Booster.save_checkpoint = save_and_die
    given = dist.group.WORLD
    train_loop(config)
    assert dist.group.WORLD is given, "Ray's process group is not used as it is"


def main() -> None:
    """Arguments: folder, tensor-parallel size, number of steps."""
    folder, tp, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ray.init(num_cpus=3, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
    try:
        result = trainer_of(killed_once, 2, tp, steps, folder).fit()
    finally:
        ray.shutdown()
    kept = sorted(path.name for path in (folder / NAME).glob("step-*"))
    found = {"losses": result.metrics["losses"], "checkpoint": result.checkpoint.path, "kept": kept}
    (folder / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
