"""The gradients of several optimizers of one model: accepted together, and clipped by one norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from booster import failure
from plugins.hybrid_parallel.loss.arithmetic import clip_factor
from plugins.hybrid_parallel.zero.bucket import Bucket


class TakesGradients(Protocol):
    """A boosted optimizer, as the functions here use it."""

    buckets: list[Bucket]

    def accepting_gradients(self, scale: float | None = None) -> AbstractContextManager[None]:
        """Accept the gradients of backward passes in this context."""

    def finish_gradients(self) -> None:
        """Reduce all gradients, and bring them to scale 1."""

    def global_norm(self) -> Tensor:
        """Return the norm of all gradients."""


@contextmanager
def accepting_gradients(optimizers: Sequence[TakesGradients], scale: float | None = None) -> Iterator[None]:
    """Accept the gradients of backward passes in this context with several optimizers."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.accepting_gradients(scale))
        yield


@failure.guard("model.clip_grad_norm_")
@torch.no_grad()
def clip_grad_norm_(optimizers: Sequence[TakesGradients], max_norm: float) -> Tensor:
    """Scale the gradients of several optimizers so that their joint norm is at most `max_norm`.

    Returns:
        The norm before scaling, 0-d, the same on every rank.
    """
    for optimizer in optimizers:
        optimizer.finish_gradients()
    norm = torch.linalg.vector_norm(torch.stack([optimizer.global_norm() for optimizer in optimizers]))
    factor = clip_factor(norm, max_norm)
    for bucket in (bucket for optimizer in optimizers for bucket in optimizer.buckets):
        bucket.scale_grads(factor)
    return norm
