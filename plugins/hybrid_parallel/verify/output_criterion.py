"""A loss for models that compute none: the distance of their outputs from a fixed wave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softsign

from booster.errors import ConfigurationError


def distance_from_wave(outputs: Any, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
    """Return the sum over samples of the squared distance of each differentiable output from a wave, and their number.

    The distance is a mean over the elements of an output. Squares alone would not do: those of an output behind a
    norm add up to a constant, whose gradient is rounding. Outputs are squashed to -1 … 1, because some are masked with
    large numbers.

    Args:
        outputs: outputs of the model.
        batch: its inputs, with samples in the first dimension of the first tensor.

    Raises:
        ConfigurationError: no output has a gradient.
    """
    rows = next(len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim())
    found = [output for output in _differentiable(outputs) if output.dim() and len(output) % rows == 0]
    if not found:
        raise ConfigurationError("none of the outputs has a gradient, so that no criterion can train the model")
    return sum((_distance(output.reshape(rows, -1)) for output in found), start=found[0].new_zeros(())), rows


def _distance(output: Tensor) -> Tensor:
    wave = torch.arange(output.shape[1], device=output.device).to(output.dtype).cos()
    return (softsign(output) - wave).square().mean(1).sum()


def _differentiable(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, Mapping):
        yield from (each for item in value.values() for each in _differentiable(item))
    elif isinstance(value, tuple | list):
        yield from (each for item in value for each in _differentiable(item))
