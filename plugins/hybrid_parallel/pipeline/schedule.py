"""Pipeline schedules as pure generators of actions. Nothing here knows tensors or ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through the stage."""

    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


Schedule = Callable[[int, int, int], Iterator[Action]]


def forward_only(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Action]:
    """Evaluation."""
    yield from (Action(Kind.FORWARD, index) for index in range(num_microbatches))


def gpipe(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965); every activation is kept until then."""
    yield from forward_only(stage, num_stages, num_microbatches)
    yield from (Action(Kind.BACKWARD, index) for index in range(num_microbatches))


def one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Action]:
    """1F1B (Narayanan et al., arXiv 2104.04473, section 2.2.1).

    Warm-up: a stage runs ahead by as many forwards as there are stages behind it. Steady state: one forward, one
    backward, so that at most `num_stages - stage` activations are alive. Cool-down: the remaining backwards.
    """
    warm_up = min(num_stages - stage - 1, num_microbatches)
    yield from (Action(Kind.FORWARD, index) for index in range(warm_up))
    for index in range(num_microbatches - warm_up):
        yield Action(Kind.FORWARD, warm_up + index)
        yield Action(Kind.BACKWARD, index)
    yield from (Action(Kind.BACKWARD, index) for index in range(num_microbatches - warm_up, num_microbatches))


SCHEDULES: dict[str, Schedule] = {"1f1b": one_forward_one_backward, "gpipe": gpipe}
