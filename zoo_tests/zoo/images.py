"""Batches of images, and what models are trained on with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zoo_tests.zoo.base import Batch
from zoo_tests.zoo.labels import MakeLabels

CHANNELS = 3


def images(size: int) -> Callable[[int, int, torch.Generator], Batch]:
    """[rows, channels, size, size] of noise."""

    def make(rows: int, step: int, generator: torch.Generator) -> Batch:
        return {"pixel_values": torch.randn(rows, CHANNELS, size, size, generator=generator)}

    return make


def masked_patches(side: int) -> MakeLabels:
    """Which of side * side patches are masked: another share of them in every sample, none in the second.

    In floating point, which models take, too: transformers rounds the count of bools to fp32.
    """

    def make(batch: Batch, generator: torch.Generator) -> Batch:
        rows = len(batch["pixel_values"])
        share = torch.linspace(0.1, 0.9, rows)[:, None]
        share[1] = 0.0
        return {"bool_masked_pos": torch.rand(rows, side * side, generator=generator).lt(share).double()}

    return make


def no_labels(batch: Batch, generator: Any) -> Batch:
    return {}


def mean_features(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """A user's criterion on the bare model: the mean over the samples of a value that each has."""
    hidden = outputs.last_hidden_state.pow(3).flatten(1).mean(1)
    return (hidden + outputs.pooler_output.square().mean(-1)).mean()


def mean_feature_maps(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """A user's criterion on a backbone: the mean over the samples of a value that each has."""
    return torch.stack([maps.pow(3).flatten(1).mean(1) for maps in outputs.feature_maps]).sum(0).mean()
