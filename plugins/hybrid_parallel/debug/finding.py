"""Finding: a non-finite value, and the causal order in which ranks sort their findings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# In causal order: a nan weight makes the losses nan, and these make the gradients nan.
WEIGHT, INPUT, MODULE, LOSS, BACKWARD, GRADIENT = KINDS = ("weight", "input", "module", "loss", "backward", "gradient")


@dataclass(frozen=True)
class Finding:
    """A non-finite value that a rank has found.

    Attributes:
        kind: one of `KINDS`.
        order: position among findings of its kind; the smallest came first.
        text: description, with the number of bad values.
        place: description of the rank; empty if the rank does not matter.
    """

    kind: str
    order: tuple[int, ...]
    text: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.text} on {self.place}" if self.place else self.text


def describe(tensor: Tensor) -> str:
    """Describe how many values of a tensor are nan or inf: "2 nan of 55 values"."""
    tensor = tensor.detach()
    num_nan, num_inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    kinds = [f"{count} {kind}" for count, kind in ((num_nan, "nan"), (num_inf, "inf")) if count]
    return f"{' and '.join(kinds)} of {tensor.numel()} values"


def is_bad(tensor: Tensor) -> bool:
    """Return whether a floating-point tensor has nan or inf."""
    # Detached: otherwise recomputation would count a tensor that autograd saves for this check.
    return not bool(torch.isfinite(tensor.detach()).all())
