"""Labels and losses of the kinds of heads that the families have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_tests.zoo.base import NUM_CLASSES, VOCAB_SIZE, Batch, num_rows

IGNORED = -100

MakeLabels = Callable[[Batch, torch.Generator], Batch]


def of_tokens(num_classes: int = VOCAB_SIZE) -> MakeLabels:
    """A label a token; another share of them ignored in every sample, all of them in the second sample."""

    def make(batch: Batch, generator: torch.Generator) -> Batch:
        mask = batch["attention_mask"]
        labels = torch.randint(0, num_classes, mask.shape, generator=generator)
        ignored_share = torch.linspace(0.1, 0.8, len(mask)).view(-1, *[1] * (mask.dim() - 1))
        ignored_share[1] = 1.1
        ignored = torch.rand(mask.shape, generator=generator) < ignored_share
        return {"labels": labels.masked_fill(ignored | (mask == 0), IGNORED)}

    return make


def of_samples(num_classes: int = NUM_CLASSES, key: str = "labels", ignore_one: bool = True) -> MakeLabels:
    """A class a sample; that of the second sample ignored."""

    def make(batch: Batch, generator: torch.Generator) -> Batch:
        labels = torch.randint(0, num_classes, (num_rows(batch),), generator=generator)
        if ignore_one:
            labels[1] = IGNORED
        return {key: labels}

    return make


def real_numbers(batch: Batch, generator: torch.Generator) -> Batch:
    """A number a sample (regression)."""
    return {"labels": torch.randn(num_rows(batch), generator=generator)}


def several_of(num_classes: int = NUM_CLASSES) -> MakeLabels:
    """Any number of classes a sample (multi-label classification)."""

    def make(batch: Batch, generator: torch.Generator) -> Batch:
        return {"labels": torch.randint(0, 2, (num_rows(batch), num_classes), generator=generator).float()}

    return make


def answer_spans(batch: Batch, generator: torch.Generator) -> Batch:
    """Start and end of an answer; some lie behind the end of the sequence, which means no answer."""
    rows, length = batch["input_ids"].shape
    positions = torch.randint(0, length + 3, (2, rows), generator=generator)
    positions[:, 1] = length + 5
    return {"start_positions": positions[0], "end_positions": positions[1]}


def causal_loss(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """Token t predicts label t + 1; the mean over labels that are not ignored."""
    return _cross_entropy(outputs.logits[..., :-1, :], batch["labels"][..., 1:])


def token_loss(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """The mean over labels that are not ignored."""
    return _cross_entropy(outputs.logits, batch["labels"])


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
