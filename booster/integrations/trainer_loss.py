"""The loss of a boosted Trainer: it is that of one process that has the samples of all replicas.

Trainer averages the losses of processes. Here that mean must be the loss of the whole batch, although the shares of
replicas have different numbers of samples and of labels: the model computes one loss of all replicas, the number of
items is counted over all of them, and any other mean over samples is weighted by their number.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from booster.data.rows import ItemCount, main_input_of, rows_of, unknown_rows
from booster.integrations.trainer_accelerator import LossInProgress, Samples, TrainerAccelerator
from shardformer.loss.terms import zero_of


class TrainerLoss:
    """Mixin of a Trainer: what it takes for the loss of a batch, and how replicas average it."""

    accelerator: TrainerAccelerator

    def _take_loss_functions(self) -> None:
        """Let the functions that the Trainer calls for a loss see the labels of all replicas."""
        if self.accelerator.num_processes == 1:
            return
        if self.label_smoother is not None:
            self.label_smoother = functools.partial(self._smooth_labels, self.label_smoother)
        if self.compute_loss_func is not None:
            self.compute_loss_func = functools.partial(self._call_loss_function, self.compute_loss_func)

    def _watch_losses_of(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(_with_plain_items, with_kwargs=True)
        model.register_forward_hook(self._note_shared_loss, prepend=True)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss as the Trainer class does; its mean over replicas is that over all samples, or items."""
        replicas = self.accelerator.num_processes
        if replicas == 1:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        rows = _rows_of(inputs, model)
        if num_items_in_batch is None and not self.model.training:
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.as_subclass(ItemCount)
        with self.accelerator.computing_loss(LossInProgress(rows, num_items_in_batch)) as progress:
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        loss, *outputs = result if return_outputs else (result,)
        self.accelerator.losses_by_rows = progress.is_shared and not progress.is_weighted
        if not (progress.is_shared or progress.is_weighted):
            if not getattr(num_items_in_batch, "was_read", False):
                loss = self._weighted(loss, rows, inputs)
            elif not progress.read_processes:  # a sum over this replica's items, divided by the number of all items
                loss = loss * replicas
        if progress.nothing is not None and not loss.requires_grad:
            # A loss may leave out what no sample is there for, but the other replicas wait for this backward pass.
            loss = loss + progress.nothing
        return (loss, *outputs) if return_outputs else loss

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Evaluate a batch; its loss is that of all replicas."""
        if self.accelerator.num_processes == 1:
            return super().prediction_step(model, inputs, *args, **kwargs)
        rows = _rows_of(inputs, model)
        with self.accelerator.computing_loss(LossInProgress(rows)) as progress:
            loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        if loss is not None:
            loss = loss if progress.is_shared or progress.is_weighted else self._weighted(loss, rows, inputs)
            loss = self.accelerator.reduce(loss, "mean")
        return loss, logits, Samples.among(labels, rows)

    def _smooth_labels(
        self, smoother: Any, outputs: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Return the smoothed loss of this replica's labels, whose mean over replicas is that over all labels."""
        progress, replicas = self.accelerator.loss_in_progress, self.accelerator.replicas.size
        if progress is not None:
            progress.is_weighted = True
        if num_items_in_batch is not None:  # Trainer multiplies by the number of replicas
            return smoother(outputs, labels, shift_labels, num_items_in_batch=num_items_in_batch)
        counted = labels[..., 1:] if shift_labels else labels
        items = self.accelerator.reduce(counted.ne(smoother.ignore_index).sum())
        return smoother(outputs, labels, shift_labels, num_items_in_batch=items) * replicas

    def _call_loss_function(
        self, function: Any, outputs: Any, labels: Any, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Tensor:
        """Return the loss of the user's function, which Trainer multiplies by the number of replicas."""
        loss = function(outputs, labels, num_items_in_batch=num_items_in_batch, **kwargs)
        progress = self.accelerator.loss_in_progress
        if progress is None or num_items_in_batch is None:
            return loss
        progress.is_weighted = True
        if getattr(num_items_in_batch, "was_read", True):
            return loss
        return self._weighted(loss, progress.rows) / self.accelerator.replicas.size

    def _weighted(self, loss: Tensor, rows: int | None, inputs: Any = None) -> Tensor:
        """Weight a mean by this replica's share of the samples, which its batch must tell."""
        given = torch.tensor([rows or 0, rows is None], device=self.args.device)
        total, unknown = self.accelerator.reduce(given).tolist()
        if unknown:
            raise unknown_rows(inputs)
        weight = rows * self.accelerator.replicas.size / max(total, 1)
        # The mean over no samples is nan.
        return loss * weight if rows else loss.nan_to_num(0.0) * 0.0

    def _note_shared_loss(self, module: nn.Module, args: tuple, outputs: Any) -> None:
        """Note whether the model computed the loss: it is then the mean over all replicas, the same on each."""
        progress = self.accelerator.loss_in_progress
        if progress is None:
            return
        if isinstance(outputs, Mapping) and "loss" in outputs:
            progress.is_shared = True
        elif progress.rows == 0 and torch.is_grad_enabled():
            progress.nothing = _nothing_of(outputs)


def _rows_of(inputs: Any, model: nn.Module) -> int | None:
    """Return the number of samples of a Trainer's inputs; None if they do not tell."""
    return rows_of(inputs if isinstance(inputs, Mapping) else dict(enumerate(inputs)), main_input_of(model))


def _nothing_of(outputs: Any) -> Tensor | None:
    """Return a zero (0-d) whose backward pass goes through the whole model; None if no output is differentiable."""
    names = outputs.keys() if isinstance(outputs, Mapping) else [slice(None)]
    values = (outputs[name] for name in names)
    found = (value for value in values if isinstance(value, Tensor) and value.requires_grad)
    return next((zero_of(value) for value in found), None)


def _with_plain_items(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Give the model the number of items as a plain tensor: that it reads it says nothing about the user's loss."""
    plain = {name: value.plain() if isinstance(value, ItemCount) else value for name, value in kwargs.items()}
    return args, plain
