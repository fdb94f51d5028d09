"""Losses that a model's forward computes itself, as a mean over its labels or as a sum.

The forward returns the mean over the labels of one micro-batch. It is weighted by their number, so that the
micro-batches of all replicas give the mean over all labels. A sum needs no weight.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.loss.heads import USUAL_HEAD_LOSSES, HeadLossBuilder, matching_key
from shardformer.loss.routers import routers_are_asked
from shardformer.loss.terms import IGNORE_INDEX, Batch, HeadLoss, LossTerm
from shardformer.utils.source import calls_loss_function


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


USUAL = "usual"
LOSSES = (*FORWARD_LOSSES, USUAL)  # the usual one reads logits that may be sharded, which a forward may not expect


def head_loss_of_kind(name: str, kind: str) -> HeadLossBuilder:
    """Return the loss of a class, of one of the kinds in `LOSSES`; a batch with other labels has another loss.

    Raises:
        KeyError: there is no usual loss of such a class.
    """
    build = USUAL_HEAD_LOSSES[matching_key(name, USUAL_HEAD_LOSSES)] if kind == USUAL else FORWARD_LOSSES[kind]
    return partial(_of_known_labels, build)


def _of_known_labels(build: HeadLossBuilder, model: nn.Module) -> HeadLoss | None:
    loss = build(model)
    if loss is not None:
        read = [name for name in inspect.signature(model.forward).parameters if "label" in name]
        known = {term.labels for term in loss.terms}
        loss.further_entries = (*loss.further_entries, *(name for name in read if name not in known))
    return loss


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


_OURS = ("shardformer.", "plugins.hybrid_parallel.", "transformers.", "torch.")


def own_loss_reason(model: nn.Module, head_loss: HeadLoss | None, batch: Batch) -> str | None:
    """Return why the model's own forward has to compute the loss, because it differs from the head's loss.

    None if `head_loss` gives the same loss for this batch.
    """
    name = type(model).__name__
    if head_loss is None:
        return f"the forward of {name} computes a loss of its own"
    if "forward" in vars(model):
        return f"the forward of this {name} was replaced"
    hooks = (*model._forward_hooks.values(), *model._forward_pre_hooks.values())
    if any(map(_is_users, hooks)):
        return f"a forward hook on the {name} may change it"
    if calls_loss_function(type(model).forward):
        function = model.loss_function
        home, known = str(getattr(function, "__module__", "")), head_loss.function
        called = getattr(function, "__name__", type(function).__name__)
        if not home.startswith("transformers.loss.") or known not in (None, called):
            return f"its loss_function is {called}"
    if head_loss.routers is None and routers_are_asked(model, batch):
        return "it adds an auxiliary loss of its routers"
    unread = head_loss.unread(batch)
    return None if unread is None else f"its loss reads {unread}"


def _is_users(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    home = getattr(function, "__module__", None) or type(function).__module__
    return not home.startswith(_OURS)
