"""StepTrace: what is kept of a step until its optimizer has taken it. References, no copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from plugins.hybrid_parallel.debug.finding import Finding
from plugins.hybrid_parallel.distributed.mesh import HybridMesh

Microbatches = Sequence[Mapping[str, Any]]


class PassWatch(Protocol):
    """What looks at the modules of a pass while it goes on."""

    def begin_pass(self, number: int) -> None:
        """Pass `number` since the last step begins."""

    def forget(self) -> None:
        """The passes so far belong to a step that is over."""

    def accept(self) -> None:
        """The gradients of the step are finite."""

    def findings(self, mesh: HybridMesh) -> list[Finding]:
        """What this rank saw that was not finite."""


class StepTrace:
    """The inputs and losses of the passes since the last step of an optimizer.

    Attributes:
        microbatches: of the last pass.
        losses: of each pass, micro-batch and share of the loss in the order of its backward passes.
        watch: what watches single modules, in debug mode.
    """

    def __init__(self) -> None:
        self.microbatches: Microbatches = ()
        self.losses: list[list[tuple[int, Tensor]]] = []
        self.watch: PassWatch | None = None
        self._is_over = False

    def begin(self, microbatches: Microbatches, losses: list[tuple[int, Tensor]]) -> None:
        """A pass begins; `losses` is filled while it goes on."""
        if self._is_over:
            self.losses, self._is_over = [], False
            if self.watch is not None:
                self.watch.forget()
        self.microbatches = microbatches
        self.losses.append(losses)
        if self.watch is not None:
            self.watch.begin_pass(len(self.losses) - 1)

    def add_loss(self, loss: Tensor) -> None:
        """The loss of an ordinary loop, whose pass has one micro-batch."""
        if not self.losses or self._is_over:
            self.begin((), [])
        self.losses[-1].append((0, loss))

    def end_step(self) -> None:
        """An optimizer takes its step; what is here stays readable until the next pass begins."""
        self._is_over = True

    def accept(self) -> None:
        """The step's gradients are finite."""
        if self.watch is not None:
            self.watch.accept()
