"""Finding: something that is not finite, and how ranks put what they found in the order of cause."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# In the order of cause: a weight that is nan makes the losses nan, and they the gradients.
WEIGHT, INPUT, MODULE, LOSS, BACKWARD, GRADIENT = KINDS = ("weight", "input", "module", "loss", "backward", "gradient")


@dataclass(frozen=True)
class Finding:
    """Something that is not finite.

    Attributes:
        kind: one of `KINDS`.
        order: place among findings of its kind; the smallest was first.
        text: what it is, with the number of its bad values.
        place: the rank, in words; empty where the rank does not matter.
    """

    kind: str
    order: tuple[int, ...]
    text: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.text} on {self.place}" if self.place else self.text


def describe(tensor: Tensor) -> str:
    """How many of its values are what: "2 of 55 values nan"."""
    tensor = tensor.detach()
    num_nan, num_inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    kinds = [f"{count} {kind}" for count, kind in ((num_nan, "nan"), (num_inf, "inf")) if count]
    return f"{' and '.join(kinds)} of {tensor.numel()} values"


def is_bad(tensor: Tensor) -> bool:
    """Whether a floating-point tensor has nan or inf."""
    # Detached: what a check saves would be counted as a tensor that recomputation has to save again.
    return not bool(torch.isfinite(tensor.detach()).all())
