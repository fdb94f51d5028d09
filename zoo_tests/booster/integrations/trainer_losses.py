"""Losses that users write for transformers' Trainer: methods of a subclass, and functions for `compute_loss_func`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Trainer


class OwnLoss(Trainer):
    """A subclass that computes its loss from the logits, as many scripts do."""

    def loss_of(self, logits: Tensor, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        raise NotImplementedError

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.loss_of(outputs.logits, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class MeanLoss(OwnLoss):
    """A mean over the samples of the batch at hand, weighted by class."""

    loss_is_scaled_for_ga = False

    def loss_of(self, logits: Tensor, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        each = functional.cross_entropy(logits, labels, reduction="none") * (1.0 + labels)
        return each.mean() + 0.1 * logits.square().mean()


class LossOfSamples(OwnLoss):
    """A mean over samples that reads no output of the model where there are none."""

    loss_is_scaled_for_ga = False

    def loss_of(self, logits: Tensor, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        return functional.cross_entropy(logits, labels) if len(labels) else torch.zeros(())


class SumLoss(OwnLoss):
    """A sum over samples, divided by their number in all batches of a step."""

    def loss_of(self, logits: Tensor, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        return functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


class SumLossOfProcesses(SumLoss):
    """The same by somebody who knows that Trainer averages the losses of processes."""

    def loss_of(self, logits: Tensor, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        return super().loss_of(logits, labels, num_items_in_batch) * self.accelerator.num_processes


class OwnEvaluation(Trainer):
    """Evaluates by a loss of its own."""

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        labels = inputs.pop("labels")
        with torch.no_grad():
            logits = model(**inputs).logits
            loss = functional.multi_margin_loss(logits, labels)
        return loss, logits, labels


def mean_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A function for `compute_loss_func` that takes the mean of the batch at hand."""
    return functional.multi_margin_loss(outputs["logits"], labels)


def sum_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A function for `compute_loss_func` that divides by the number of items of a step."""
    return functional.multi_margin_loss(outputs.logits, labels, reduction="sum") / num_items_in_batch
