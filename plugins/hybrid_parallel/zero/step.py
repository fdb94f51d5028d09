"""Inputs of a step of the optimizer: its options, its parameters, and the record of its passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.bucket_layout import BucketSlice
from plugins.hybrid_parallel.zero.frozen import FrozenParameters
from plugins.hybrid_parallel.zero.stepper import Stepper
from plugins.hybrid_parallel.zero.whole_parameters import WholeParameters


class StepRecord(Protocol):
    """Record of the passes since the last step."""

    microbatches: Sequence[Mapping[str, Any]]

    def add_loss(self, loss: Tensor) -> None:
        """Record the loss of a pass in an ordinary training loop."""

    def end_step(self) -> None:
        """Record that the optimizer takes its step."""

    def accept(self) -> None:
        """Record that the gradients of the step are finite."""


class Average(Protocol):
    """An average of the parameters of an optimizer."""

    num_updates: int

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Average the weights of further buckets."""

    def piece_of(self, bucket: Bucket, piece: BucketSlice) -> Tensor:
        """Return the average of a piece of a parameter, as a view that may be written."""

    def restart(self) -> None:
        """Forget the average: the next update copies the weights."""


@dataclass(frozen=True)
class StepOptions:
    """Options of a step.

    Attributes:
        max_norm: upper limit for the global gradient norm; None for no clipping.
        nonfinite: "raise", "skip" or "ignore" steps whose gradients are nan or inf on any rank.
        overlap_allgather: whether the all-gather of parameters may run until the next forward pass.
        stepper: runs the step of the user's optimizer.
    """

    max_norm: float | None
    nonfinite: str
    overlap_allgather: bool
    stepper: Stepper


@dataclass(frozen=True)
class LocalParameters:
    """The parameters of an optimizer on this rank.

    Attributes:
        names: local parameter -> its Hugging Face name.
        aliases: name -> the other names of the same (tied) parameter.
        order: the local parameters as the optimizer held them before, by group; None for those on other stages.
        frozen: the parameters that have no bucket yet.
        wholes: the parameters that the optimizer reads whole, although ranks hold parts of them.
        group_names: names of the parameters of the whole model, by group.
    """

    names: Mapping[nn.Parameter, str]
    aliases: Mapping[str, tuple[str, ...]]
    order: Sequence[Sequence[nn.Parameter | None]]
    frozen: FrozenParameters
    wholes: WholeParameters
    group_names: Sequence[Sequence[str]] = ()
