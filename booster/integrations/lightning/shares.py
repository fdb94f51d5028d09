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

from booster.integrations.replicas import Replicas

_LOSS = "loss"


class ReplicaShares:
    """Shares of the batches that one rank's models have seen.

    Args:
        replicas: the data-parallel replicas.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self._weight = 1.0  # samples of the batch at hand, as a multiple of the mean over replicas
        self._outputs: list[tuple[float, Any]] = []  # of calls that have no gradients yet, where the weight is not 1
        self._in_step = False

    def attach(self, model: nn.Module) -> None:
        """Weigh the outputs of a boosted model from now on."""
        if self.replicas.size > 1:
            model.register_forward_pre_hook(self._before, with_kwargs=True)
            model.register_forward_hook(self._after)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Weigh means of values of a batch in this context."""
        self._in_step, self._weight = True, 1.0
        self._outputs.clear()
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
        """Put the weights on the gradients of the outputs so far; call it before the backward pass."""
        for weight, outputs in self._outputs:
            for tensor in _tensors_besides_loss(outputs):
                tensor.register_hook(partial(torch.mul, weight))
        self._outputs.clear()

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        rows = next((tensor.shape[0] for tensor in _tensors([*args, kwargs]) if tensor.dim()), None)
        if rows is None:
            return
        total = int(self.replicas.reduce(torch.tensor(rows)))
        self._weight = rows * self.replicas.size / total if total else 1.0

    def _after(self, module: nn.Module, args: tuple, outputs: Any) -> None:
        if self._weight != 1.0 and torch.is_grad_enabled():
            self._outputs.append((self._weight, outputs))


def _tensors_besides_loss(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Mapping):
        # The values that a pipeline has not fetched yet are no tensors there, and nothing depends on them.
        values = dict.items(outputs) if isinstance(outputs, dict) else outputs.items()
        outputs = [value for name, value in values if name != _LOSS]
    for tensor in _tensors(outputs):
        if tensor.requires_grad:
            yield tensor


def _tensors(data: Any) -> Iterator[Tensor]:
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Mapping):
        yield from _tensors(list(dict.values(data) if isinstance(data, dict) else data.values()))
    elif isinstance(data, tuple | list):
        for each in data:
            yield from _tensors(each)
