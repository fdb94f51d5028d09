"""One training loop of accelerate, which runs on its own `Accelerator` and on ours.

Nothing here knows which of the two it drives: a test compares what they leave behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from booster.integrations.accelerate import Accelerator
from plugins.hybrid_parallel import HybridParallelPlugin

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp_size": 2}),
    "pp2": (2, {"pp_size": 2, "num_microbatches": 2}),
    "dp2": (2, {}),
    "tp2pp2": (4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}),
}
ROWS, GLOBAL_BATCH, EVALUATED, WORDS = 27, 6, 11, 61
Sample = dict[str, Any]


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Let accelerate begin as in a new process, and forget what it has learnt afterwards."""
    with mock.patch.dict(os.environ):
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def bert(dtype: torch.dtype = torch.float32, seed: int = 1, **options: Any) -> nn.Module:
    """Always the same, without dropout, with three classes."""
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 16}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_labels=3, **sizes | options)).to(dtype)


def samples(rows: int, seed: int = 0) -> list[Sample]:
    """Sentences of 3 to 9 words, no two alike."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 10, (rows,), generator=generator).tolist()
    return [
        {"words": torch.randint(1, WORDS, (length,), generator=generator).tolist(), "label": number % 3}
        for number, length in enumerate(lengths)
    ]


def collate(batch: list[Sample]) -> dict[str, Tensor]:
    """Pad to the longest sentence."""
    width = max(len(each["words"]) for each in batch)
    rows = [each["words"] + [0] * (width - len(each["words"])) for each in batch]
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([e["label"] for e in batch])}


def loader(rows: int, batch_size: int, seed: int = 0, **options: Any) -> DataLoader:
    """A loader of ragged sentences."""
    return DataLoader(samples(rows, seed), batch_size=batch_size, collate_fn=collate, **options)


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        epochs: of `ROWS` samples, the last batch of which is short.
        accumulate: batches of an optimizer step; the last group of an epoch is incomplete.
        optimizer: makes the optimizer of parameters.
        dtype: of the weights.
        max_norm: of the gradients; None to leave them.
        max_value: of an element of the gradients; None to leave them.
        shuffle: whether each epoch has its own order of samples.
    """

    epochs: int = 2
    accumulate: int = 2
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    options: tuple[tuple[str, float], ...] = (("lr", 0.1), ("momentum", 0.9))
    dtype: torch.dtype = torch.float32
    max_norm: float | None = 0.3
    max_value: float | None = None
    shuffle: bool = True


@dataclass
class Record:
    """What training left behind, by step or epoch.

    Attributes:
        drawn: a random number after it, as a model that is built then has.
    """

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    synced: list[bool] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    drawn: float = 0.0


def plain(job: Job, replicas: int = 1) -> Record:
    """Run the loop on accelerate's own class, in one process; the schedule counts the batches of `replicas`."""
    with fresh_accelerate():
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=job.accumulate)
        return train(accelerator, job, 1, replicas)


def boosted(job: Job, layout: str) -> Record:
    """Run the loop on our class, on this rank."""
    with fresh_accelerate():
        plugin = HybridParallelPlugin(**LAYOUTS[layout][1])
        accelerator = Accelerator(plugin=plugin, gradient_accumulation_steps=job.accumulate)
        return train(accelerator, job, plugin.dp_size, 1)


def schedule(step: int) -> float:
    """A rate that changes at every step."""
    return 1.0 / (1.0 + 0.07 * step)


def train(accelerator: Any, job: Job, replicas: int, repeats: int) -> Record:
    """Train and evaluate; a batch of a loader is that of one replica."""
    model = bert(job.dtype)
    optimizer = job.optimizer(model.parameters(), **dict(job.options))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step * repeats))
    batches = loader(ROWS, GLOBAL_BATCH // replicas, shuffle=job.shuffle)
    evaluated = loader(EVALUATED, 4 // replicas, seed=5)
    torch.manual_seed(7)  # of the order of samples
    model, optimizer, batches, evaluated, scheduler = accelerator.prepare(
        model, optimizer, batches, evaluated, scheduler
    )
    record = Record()
    for _ in range(job.epochs):
        model.train()
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and job.max_norm is not None:
                    norm = accelerator.clip_grad_norm_(model.parameters(), job.max_norm)
                    record.norms.append(float(norm.detach()))
                if accelerator.sync_gradients and job.max_value is not None:
                    accelerator.clip_grad_value_(model.parameters(), job.max_value)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            record.losses.append(float(loss.detach()))
            record.rates.append(scheduler.get_last_lr()[0])
            record.synced.append(accelerator.sync_gradients)
        record.metrics.append(evaluate(accelerator, model, evaluated))
    record.drawn = torch.rand(()).item()
    record.weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return record


def evaluate(accelerator: Any, model: Any, batches: Any) -> tuple[Tensor, Tensor]:
    """Return the logits and labels of all samples."""
    model.eval()
    logits, labels = [], []
    for batch in batches:
        with torch.no_grad():
            outputs = model(**batch)
        found = accelerator.gather_for_metrics((outputs.logits, batch["labels"]))
        logits.append(found[0])
        labels.append(found[1])
    return torch.cat(logits), torch.cat(labels)
