"""A step of `boosted(Trainer)` against the same job written with `execute_pipeline`.

Both run in one process, turn by turn: a callback runs a step of the other job at the end of each of Trainer's steps. A
step is all that a loop does for a batch: data, forward, backward, clipping, optimizer, scheduler, logging every tenth.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    get_linear_schedule_with_warmup,
)

from benchmarks.harness import ratio, run_ranks, table
from booster import Booster
from booster.integrations.transformers import boosted
from plugins.hybrid_parallel import HybridParallelPlugin

LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {}, "tp2": {"tp_size": 2}, "pp2": {"pp_size": 2, "num_microbatches": 4}}
ROWS, LENGTH, WARM_UP = 16, 64, 3  # of a global batch; steps that are not timed


class Turns(TrainerCallback):
    """Time Trainer's steps, and run a step of the other job after each.

    Args:
        other: a step of the other job.
    """

    def __init__(self, other: Callable[[], None]) -> None:
        self.other = other
        self.times: dict[str, list[float]] = {"Trainer": [], "execute_pipeline": []}
        self._start = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        dist.barrier()
        self._start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        dist.barrier()
        end = time.perf_counter()
        self.other()
        dist.barrier()
        after = time.perf_counter()
        self.times["Trainer"].append(end - self._start)
        self.times["execute_pipeline"].append(after - end)
        self._start = time.perf_counter()


def measure(layout: str, steps: int) -> dict[str, list[float]]:
    """Return the seconds of each job's steps."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=8192
    )
    model = BertForSequenceClassification(config)
    ids = torch.randint(1, 8192, (ROWS * (steps + WARM_UP), LENGTH))
    samples = [{"input_ids": row, "labels": row[0] % 2} for row in ids]
    rows = ROWS // 2 if layout == "dp2" else ROWS  # of a replica
    other = _by_hand(copy.deepcopy(model), samples, rows, steps + WARM_UP, LAYOUTS[layout])
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=rows,
            max_steps=steps + WARM_UP,
            learning_rate=1e-4,
            logging_steps=10,
            disable_tqdm=True,
            report_to="none",
            save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
        )
        timer = Turns(other)
        trainer = boosted(Trainer)(
            model=model,
            args=arguments,
            train_dataset=samples,
            data_collator=default_data_collator,
            callbacks=[timer],
            plugin=HybridParallelPlugin(**LAYOUTS[layout]),
        )
        trainer.train()
    return {name: times[WARM_UP:] for name, times in timer.times.items()}


def _by_hand(
    model: BertForSequenceClassification, samples: list[Any], rows: int, steps: int, layout: dict[str, Any]
) -> Callable[[], None]:
    booster = Booster(plugin=HybridParallelPlugin(max_norm=1.0, **layout))
    loader = DataLoader(samples, rows, shuffle=True, collate_fn=default_data_collator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, steps)
    model, optimizer, loader, scheduler = booster.boost(model, optimizer, loader, lr_scheduler=scheduler)
    batches: Iterator[Any] = iter(loader)
    counted = iter(range(steps))

    def step() -> None:
        result = booster.execute_pipeline(batches, model, optimizer=optimizer)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if next(counted) % 10 == 9:
            float(result.loss)

    return step


def report(quick: bool) -> str:
    rows: list[list[object]] = []
    for layout in LAYOUTS:
        times = run_ranks(measure, 2, layout, 3 if quick else 41)
        rows.append([layout, 1 / ratio(times, "Trainer", "execute_pipeline")])
    return table(
        "A step of boosted(Trainer): time relative to the same job by execute_pipeline (BERT, 2 ranks, limit 1.05)",
        ["layout", "time of a step"],
        rows,
        "Under pp2 a Trainer runs the ordinary loop, with all forward passes before any backward pass.",
    )
