"""StepTrace: references to the data of a step, kept until its optimizer has stepped. It makes no copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from plugins.hybrid_parallel.debug.finding import Finding
from plugins.hybrid_parallel.distributed.mesh import HybridMesh

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

    Args:
        watch: observer of single modules, in debug mode.

    Attributes:
        microbatches: the micro-batches of the last pass.
        losses: for each pass, (micro-batch, share of the loss) pairs in the order of its backward passes.
    """

    def __init__(self, watch: PassWatch | None = None) -> None:
        self.microbatches: Microbatches = ()
        self.losses: list[list[tuple[int, Tensor]]] = []
        self.watch = watch
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
