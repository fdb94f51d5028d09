"""The gradients of several optimizers: accepted together, divided by one count, and clipped by one norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from booster import failure
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.loss.arithmetic import clip_factor
from plugins.hybrid_parallel.loss.replica_losses import Counts
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.reducer import GradientReducer


class TakesGradients(Protocol):
    """A boosted optimizer, as the functions here use it."""

    buckets: list[Bucket]
    reducer: GradientReducer

    def accepting_gradients(self, scale: float | None = None) -> AbstractContextManager[None]:
        """Accept the gradients of backward passes in this context."""

    def finish_gradients(self) -> None:
        """Reduce all gradients, and bring them to scale 1."""

    def global_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients."""


@contextmanager
def accepting_gradients(optimizers: Sequence[TakesGradients], scale: float | None = None) -> Iterator[None]:
    """Accept the gradients of backward passes in this context with several optimizers."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.accepting_gradients(scale))
        yield


@contextmanager
def counting(
    optimizers: Sequence[TakesGradients], others: Sequence[TakesGradients], count: Tensor | None
) -> Iterator[Counts | None]:
    """Run the backward pass of a loss in this context, after those whose gradients are pending.

    Args:
        optimizers: of the model that the loss is for.
        others: of other models, which the loss may reach.
        count: count of the loss over all replicas, 0-d; None for a mean.

    Yields:
        Counts of the loss and of the pending ones; None for a mean.

    Raises:
        ConfigurationError: if the pending gradients are of another kind, or have counts of their own.
    """
    pending = [each.reducer for each in optimizers if each.reducer.pending]
    if count is None:
        counts = None
    elif pending and pending[0].counts is not None:
        counts = pending[0].counts
        counts.add(count)
    else:
        counts = Counts(count)
    _refuse_other_counts(pending, counts)
    for reducer in (each.reducer for each in (*optimizers, *others)):
        reducer.counts = reducer.counts if reducer.pending else counts
    mixed = [each.reducer for each in others if each.reducer.counts is not counts]
    for reducer in mixed:
        reducer.is_reached = False
    yield counts
    _refuse_other_counts([reducer for reducer in mixed if reducer.is_reached], counts)


def _refuse_other_counts(reducers: Sequence[GradientReducer], counts: Counts | None) -> None:
    if any(reducer.counts is not counts for reducer in reducers):
        raise ConfigurationError(
            "gradients of a mean and of (sum, count), or of two losses with counts of their own, would add up before "
            "they are reduced; within one no_sync give one of these forms, for one model"
        )


@failure.guard("model.clip_grad_norm_")
@torch.no_grad()
def clip_grad_norm_(optimizers: Sequence[TakesGradients], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients of several optimizers so that their joint norm is at most `max_norm`.

    Args:
        norm_type: the `p` of the p-norm, above 0; `inf` for the largest absolute value.

    Returns:
        The norm before scaling, 0-d, the same on every rank.

    Raises:
        ConfigurationError: if a norm is no number, or cannot be.
    """
    max_norm = _number("max_norm", max_norm, "of 0 or more", lambda value: value >= 0)
    norm_type = _number("norm_type", norm_type, "above 0, or inf for the largest gradient", lambda value: value > 0)
    for optimizer in optimizers:
        optimizer.finish_gradients()
    norm = torch.linalg.vector_norm(torch.stack([each.global_norm(norm_type) for each in optimizers]), norm_type)
    factor = clip_factor(norm, max_norm)
    for bucket in (bucket for optimizer in optimizers for bucket in optimizer.buckets):
        bucket.scale_grads(factor)
    return norm


def _number(name: str, value: Any, words: str, holds: Callable[[float], bool]) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not holds(number):
        raise ConfigurationError(f"clip_grad_norm_ got {name}={value!r}; use a number {words}")
    return number
