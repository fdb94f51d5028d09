"""A job of a boosted Trainer with a callback that acts on rank 0 alone: `trainer_alone.py ACTION LAYOUT FOLDER`.

ACTION is a method of the Trainer, or "nothing"; LAYOUT has options of HybridParallelPlugin, as JSON. As in most
scripts, nothing of ours comes before `TrainingArguments`, which makes the process group.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from booster.integrations.transformers import boosted
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.booster.integrations import trainer_jobs

_STEPS = 4


class Alone(TrainerCallback):
    """Calls a method of the Trainer on rank 0 after the second step."""

    def __init__(self, action: str) -> None:
        self.action, self.trainer = action, None

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self.action != "nothing" and state.global_step == 2 and state.is_world_process_zero:
            print(f"strikes at {time.time()}", flush=True)
            getattr(self.trainer, self.action)()


def main(action: str, layout: str, folder: str) -> None:
    args = TrainingArguments(
        folder, max_steps=_STEPS, per_device_train_batch_size=2, use_cpu=True, report_to="none", disable_tqdm=True
    )
    group = dist.group.WORLD
    train(action, args, json.loads(layout))
    gc.collect()
    value = torch.ones(1)
    dist.all_reduce(value)
    print(f"ends well, {dist.group.WORLD is group}, {int(value)}")


def train(action: str, args: TrainingArguments, layout: dict[str, Any]) -> None:
    callback = Alone(action)
    trainer = boosted(Trainer)(
        trainer_jobs.bert(),
        args,
        train_dataset=trainer_jobs.pairs(40),
        eval_dataset=trainer_jobs.pairs(8),
        data_collator=trainer_jobs.collate,
        callbacks=[callback],
        plugin=HybridParallelPlugin(**layout),
    )
    trainer.remove_callback(PrinterCallback)
    callback.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
