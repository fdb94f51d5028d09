"""What is found by a walk over all modules of a model, and lists of names in sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

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
