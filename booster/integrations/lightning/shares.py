"""Weights of replicas whose shares of a batch have different sizes, as those of a short last batch have.

A value that a step logs is a mean over this replica's samples. The mean over replicas is the mean over all samples if
each replica counts by its samples. `Booster.backward` puts such weights on gradients by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from booster.data.rows import main_input_of, rows_of_call, unknown_rows
from booster.integrations.replicas import Replicas


class ReplicaShares:
    """Shares of the batches that one rank's models have seen.

    Args:
        replicas: the data-parallel replicas.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self._weight = 1.0  # samples of the batch at hand, as a multiple of the mean over replicas
        self._in_step = False

    def attach(self, model: nn.Module) -> None:
        """Count the samples of the batches that a boosted model is called with from now on."""
        if self.replicas.size > 1:
            model.register_forward_pre_hook(self._before, with_kwargs=True)

    @property
    def is_empty(self) -> bool:
        """Whether the user's step runs, and this replica has no sample of the batch."""
        return self._in_step and self._weight == 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Weigh means of values of a batch in this context."""
        self._in_step, self._weight = True, 1.0
        try:
            yield
        finally:
            self._in_step = False

    def weighted(self, value: Tensor) -> Tensor:
        """Return a value of this replica's batch, such that the mean over replicas counts each sample once.

        Raises:
            ConfigurationError: the batch of a replica does not tell its samples; raised on all replicas.
        """
        if not self._in_step or self._weight == 1.0:
            return value
        if math.isnan(self._weight):
            raise unknown_rows()
        # The mean over no samples is nan.
        return value * self._weight if self._weight else torch.zeros_like(value)

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        rows = rows_of_call(args, kwargs, main_input_of(module))
        total, unknown = self.replicas.reduce(torch.tensor([rows or 0, rows is None])).tolist()
        self._weight = math.nan if unknown else (rows * self.replicas.size / total if total else 1.0)
