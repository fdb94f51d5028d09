"""StepTrace: references to the data of a step, kept until its optimizer has stepped. It makes no copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from plugins.hybrid_parallel.distributed.mesh import HybridMesh

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


Microbatches = Sequence[Mapping[str, Any]]


class PassWatch(Protocol):
    """Observer of the modules in a pass."""

    def begin_pass(self, number: int) -> None:
        """Begin pass `number` since the last step."""

    def begin_microbatch(self, index: int) -> None:
        """Begin either direction of a micro-batch."""

    def forget(self) -> None:
        """Forget the passes so far, because their step is over."""

    def accept(self) -> None:
        """Accept what was seen, because the gradients of the step are finite."""

    def findings(self, mesh: HybridMesh) -> list[Finding]:
        """Return the non-finite values that this rank saw."""


class StepTrace:
    """Inputs and losses of the passes since the last step of an optimizer.

    Attributes:
        microbatches: the micro-batches of the last pass.
        losses: for each pass, (micro-batch, share of the loss) pairs in the order of its backward passes.
        watch: observer of single modules, in debug mode.
    """

    def __init__(self) -> None:
        self.microbatches: Microbatches = ()
        self.losses: list[list[tuple[int, Tensor]]] = []
        self.watch: PassWatch | None = None
        self._is_over = False

    def begin(self, microbatches: Microbatches, losses: list[tuple[int, Tensor]]) -> None:
        """Begin a pass; `losses` is filled while it runs."""
        if self._is_over:
            self.losses, self._is_over = [], False
            if self.watch is not None:
                self.watch.forget()
        self.microbatches = microbatches
        self.losses.append(losses)
        if self.watch is not None:
            self.watch.begin_pass(len(self.losses) - 1)

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of an ordinary loop, in which a pass has one micro-batch."""
        if not self.losses or self._is_over:
            self.begin((), [])
        self.losses[-1].append((0, loss))

    def end_step(self) -> None:
        """Record that an optimizer takes its step; the data stays readable until the next pass begins."""
        self._is_over = True

    def accept(self) -> None:
        """Record that the step's gradients are finite."""
        if self.watch is not None:
            self.watch.accept()
