"""Weights of replicas whose shares of a batch have different sizes, as those of a short last batch have.

The loss that a boosted model returns is the mean over all replicas. What a script computes from other outputs is a mean
over this replica's samples, and gradients are averaged over replicas: that average is the mean over all samples if each
replica counts by its samples. The weights are put on the gradients of these outputs, so that a loss may have terms of
both kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from booster.integrations.replicas import Replicas, map_tensors

_LOSS = "loss"


class ReplicaShares:
    """Shares of the batches that one rank's models have seen.

    Args:
        replicas: the data-parallel replicas.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self._weight = 1.0  # samples of the batch at hand, as a multiple of the mean over replicas
        # Outputs of pipelines, with their weights and the names of those that need none any more.
        self._fetched_later: list[tuple[float, Mapping[str, Any], set[str]]] = []
        self._in_step = False

    def attach(self, model: nn.Module) -> None:
        """Weigh the outputs of a boosted model from now on."""
        if self.replicas.size > 1:
            model.register_forward_pre_hook(self._before, with_kwargs=True)
            model.register_forward_hook(self._after)

    @property
    def is_empty(self) -> bool:
        """Whether the user's step runs, and this replica has no sample of the batch."""
        return self._in_step and self._weight == 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Weigh means of values of a batch in this context."""
        self._in_step, self._weight = True, 1.0
        self._fetched_later.clear()
        try:
            yield
        finally:
            self._in_step = False

    def weighted(self, value: Tensor) -> Tensor:
        """Return a value of this replica's batch, such that the mean over replicas counts each sample once."""
        if not self._in_step or self._weight == 1.0:
            return value
        # The mean over no samples is nan.
        return value * self._weight if self._weight else torch.zeros_like(value)

    def weigh_gradients(self) -> None:
        """Put the weights on the gradients of outputs that a pipeline has fetched; call it before the backward pass."""
        for weight, outputs, done in self._fetched_later:
            for tensor in (each for name, value in _entries(outputs) if name not in done for each in _tensors(value)):
                if tensor.requires_grad:
                    tensor.register_hook(partial(torch.mul, weight))
        self._fetched_later.clear()

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        rows = next((tensor.shape[0] for tensor in _tensors([*args, kwargs]) if tensor.dim()), None)
        if rows is None:
            return
        total = int(self.replicas.reduce(torch.tensor(rows)))
        self._weight = rows * self.replicas.size / total if total else 1.0

    def _after(self, module: nn.Module, args: tuple, outputs: Any) -> Any:
        """Return the outputs with weights on their gradients, which the loss among them does without."""
        if self._weight == 1.0 or not torch.is_grad_enabled():
            return None
        weigh = partial(_Weighed.apply, self._weight)
        if not isinstance(outputs, Mapping):
            return map_tensors(lambda each: weigh(each) if each.dim() else each, outputs)
        done = {name for name, value in _entries(outputs) if any(True for _ in _tensors(value))} | {_LOSS}
        for name, value in list(_entries(outputs)):
            if name in done - {_LOSS}:
                outputs[name] = map_tensors(weigh, value)
        self._fetched_later.append((self._weight, outputs, done))
        return outputs


class _Weighed(torch.autograd.Function):
    """Passes a tensor on, and a multiple of its gradient back."""

    @staticmethod
    def forward(ctx: Any, weight: float, tensor: Tensor) -> Tensor:
        """Return a view of the tensor, of which other results do not depend."""
        ctx.weight = weight
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """Return the multiple."""
        return None, grad * ctx.weight


def _entries(outputs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the outputs that are there: in a pipeline, what has not been fetched is no tensor."""
    yield from dict.items(outputs) if isinstance(outputs, dict) else outputs.items()


def _tensors(data: Any) -> Iterator[Tensor]:
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Mapping):
        for _, each in _entries(data):
            yield from _tensors(each)
    elif isinstance(data, tuple | list):
        for each in data:
            yield from _tensors(each)
