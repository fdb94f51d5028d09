"""Features of some tokens of a batch, such as those that become of images.

Models have them as [tokens, hidden], with a mask [batch, seq] or [batch, seq, 1] that names the tokens in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def mask_among(values: Iterable[Any]) -> Tensor | None:
    """Return the first mask of tokens among inputs of a model as [batch, seq]; None if there is none."""
    masks = (each for each in values if isinstance(each, Tensor) and each.dtype == torch.bool and each.dim() > 1)
    return next((each if each.dim() == 2 else each[..., 0] for each in masks), None)


def by_layer(value: Any) -> dict[int, Tensor]:
    """Return the features of each layer that a list or a dictionary holds; none of another value."""
    numbered = dict(enumerate(value)) if isinstance(value, list | tuple) else value
    return dict(numbered) if isinstance(numbered, Mapping) else {}


def spread(features: Tensor, mask: Tensor) -> Tensor:
    """Return [batch, seq, hidden] with [tokens, hidden] at the tokens of the mask, and 0 elsewhere."""
    return features.new_zeros(*mask.shape, features.shape[-1]).masked_scatter(mask[..., None], features)


def part_of(features: Tensor, mask: Tensor, cut: Callable[[Tensor], Tensor]) -> Tensor:
    """Return those of [tokens, hidden] whose tokens are in the part that `cut` takes of each of [batch, seq]."""
    numbers = mask.flatten().cumsum(0).view_as(mask) - 1
    return features[cut(numbers)[cut(mask)]]
