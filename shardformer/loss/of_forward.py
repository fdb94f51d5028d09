"""Losses that a model's forward computes itself, as a mean over its labels or as a sum.

The forward returns the mean over the labels of one micro-batch. It is weighted by their number, so that the
micro-batches of all replicas give the mean over all labels. A sum needs no weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.loss.terms import IGNORE_INDEX, Batch, HeadLoss, LossTerm


def mean_over_labels(_: nn.Module, skipped: int = 0) -> HeadLoss:
    """Return the loss of a forward that averages over the labels [..., seq] that are not -100.

    Args:
        skipped: number of labels of each sequence that nothing predicts: 1 if each token predicts the next one.
    """

    def of_tokens(labels: Tensor, _: Batch) -> Tensor:
        return labels[..., skipped:]

    term = LossTerm("labels", lambda labels, _: _count(labels), _total, is_input=True, prepare=of_tokens)
    return _of_forward(HeadLoss(term))


def sum_over_samples(_: nn.Module) -> HeadLoss:
    """Return the loss of a forward that adds up the losses of its samples (RAG)."""

    def total(outputs: Mapping[str, Any], _: Tensor) -> Tensor:
        return outputs["loss"]

    term = LossTerm("labels", lambda labels, _: torch.tensor(len(labels)), total, is_sum=True, is_input=True)
    return _of_forward(HeadLoss(term))


FORWARD_LOSSES = {
    "mean_of_labels": mean_over_labels,
    "mean_of_next_labels": partial(mean_over_labels, skipped=1),
    "sum": sum_over_samples,
}


def _of_forward(loss: HeadLoss) -> HeadLoss:
    loss.reads_whole_logits = True
    return loss


def _count(labels: Tensor) -> Tensor:
    return (labels != IGNORE_INDEX).sum()


def _total(outputs: Mapping[str, Any], labels: Tensor) -> Tensor:
    count = _count(labels)
    if count:
        return outputs["loss"] * count
    # The mean over no labels is NaN; the parameters get gradients of zero.
    others = (value for name, value in outputs.items() if name != "loss" and isinstance(value, Tensor))
    return next(value for value in others if value.is_floating_point()).sum() * 0.0
