"""What is found among the modules and the inputs of a model, and lists of names in sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Found = TypeVar("Found")


def remembered(model: nn.Module, find: Callable[[Any], Found]) -> Found:
    """Return what `find(model)` returned the first time: a walk in each step is time in which a GPU gets no work.

    For models whose modules stay, as those of a boosted model do.
    """
    name = f"_remembered_{find.__name__}"
    if name not in vars(model):
        vars(model)[name] = find(model)
    return vars(model)[name]


def divisors_phrase(count: int) -> str:
    """Return the divisors of `count` as a phrase: "1, 2 or 4"."""
    divisors = [str(size) for size in range(1, count + 1) if count % size == 0]
    return divisors[0] if len(divisors) == 1 else f"{', '.join(divisors[:-1])} or {divisors[-1]}"


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


# Of inputs and outputs: since transformers 5.24, before it, and before it in Mamba and its like.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_MODULE = "transformers.cache_utils"


def cache_name(inputs: Mapping[str, Any]) -> str | None:
    """Return the name of the input that is a cache, known by its class, so that a release may rename it; else None.

    What has one of the old names counts whatever it is. An input of a user's own model may be called `cache`.
    """
    return next(
        (name for name, value in inputs.items() if value is not None and (name in CACHE_NAMES[1:] or _is_cache(value))),
        None,
    )


def _is_cache(value: Any) -> bool:
    return any(base.__module__ == _MODULE for base in type(value).__mro__)
