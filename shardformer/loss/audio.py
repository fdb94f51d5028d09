"""Losses of audio heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardformer.loss.terms import Batch, HeadLoss, LossTerm


def mean_of_samples(model: nn.Module) -> HeadLoss:
    """Return the loss of heads that average over samples of equal weight: the model's mean is turned into a sum."""
    return HeadLoss(LossTerm("labels", _samples, _sum_of_mean, is_input=True))


def connectionist(model: nn.Module) -> HeadLoss:
    """Return the CTC loss: a sum over samples, or a mean over samples of each sample's loss per label."""
    if model.config.ctc_loss_reduction == "sum":
        return HeadLoss(LossTerm("labels", _samples, lambda outputs, _: outputs.loss, is_input=True, is_sum=True))
    return mean_of_samples(model)


def _samples(labels: Tensor, _: Batch) -> Tensor:
    return labels.new_tensor(len(labels))


def _sum_of_mean(outputs: Any, labels: Tensor) -> Tensor:
    return outputs.loss * len(labels)
