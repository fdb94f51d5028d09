"""Pipeline schedules as pure generators of actions, independent of tensors and processes.

A *stage* is a part of the model. A *rank* is a position on the `pp` axis, which holds one stage or several *chunks*.
Within a stage, passes of one kind run in the order of micro-batches, so messages between two stages keep that order
too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Kind(Enum):
    """Kind of a pass; a backward pass is whole or split into two halves."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"  # gradients of activations, and of parameters other than matrices of linear layers
    BACKWARD_WEIGHT = "W"  # gradients of matrices of linear layers

    @property
    def title(self) -> str:
        """What pictures and traces call it."""
        return _TITLES[self]


_TITLES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, activations",
    Kind.BACKWARD_WEIGHT: "backward, weights",
}


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @cached_property  # a schedule is made once, and each pass reads it
    def title(self) -> str:
        """What traces call it, such as "forward 3, stage 1"."""
        return f"{self.kind.title} {self.microbatch}, stage {self.stage}"


# (rank, number of ranks, number of micro-batches, chunks per rank) -> (kind, chunk, micro-batch)
Passes = Iterator[tuple[Kind, int, int]]


@dataclass(frozen=True)
class Schedule:
    """Order in which the ranks of a pipeline run their passes."""

    passes: Callable[[int, int, int, int], Passes]  # yields the passes of one rank, for `least` micro-batches or more
    chunks: int | None = 1  # number of stages per rank; None if the user chooses it
    least_chunks: int = 1  # smallest number of chunks that may be chosen
    # whether the second chunk of a rank is as far from the end as the first is from the beginning, so that the first
    # rank holds the first and the last stage; otherwise stages are assigned to ranks in turn
    in_v: bool = False
    splits_backward: bool = False  # whether backward passes may be split into two halves
    # number of ranks -> smallest number of micro-batches that the order is made for; with fewer, the missing ones are
    # left out of it
    least: Callable[[int], int] = lambda num_ranks: 1

    def stages_of(self, rank: int, num_ranks: int, num_chunks: int) -> list[int]:
        """Return the stages of a rank, by chunk."""
        if self.in_v:
            return [rank, 2 * num_ranks - 1 - rank]
        return [chunk * num_ranks + rank for chunk in range(num_chunks)]

    def rank_of(self, stage: int, num_ranks: int) -> int:
        """Return the rank that holds a stage."""
        if self.in_v:
            return min(stage, 2 * num_ranks - 1 - stage)
        return stage % num_ranks

    def actions(self, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> list[Action]:
        """Return the actions of `rank` in a training step."""
        stages = self.stages_of(rank, num_ranks, num_chunks)
        full = max(num_microbatches, self.least(num_ranks))
        passes = self.passes(rank, num_ranks, full, num_chunks) if num_microbatches else ()
        return [
            Action(kind, stages[chunk], microbatch)
            for kind, chunk, microbatch in passes
            if microbatch < num_microbatches
        ]

    def forward_only(self, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> list[Action]:
        """Return the actions of `rank` in an evaluation step: each round of micro-batches, chunk by chunk."""
        stages = self.stages_of(rank, num_ranks, num_chunks)
        order = _in_rounds(num_ranks, num_microbatches, range(len(stages)))
        return [Action(Kind.FORWARD, stages[chunk], microbatch) for chunk, microbatch in order]

    def backward_only(self, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> list[Action]:
        """Return the actions of `rank` in a backward pass that follows `forward_only`: its mirror image."""
        forwards = self.forward_only(rank, num_ranks, num_microbatches, num_chunks)
        return [Action(Kind.BACKWARD, action.stage, action.microbatch) for action in reversed(forwards)]


def gpipe(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Passes:
    """Yield all forwards, then all backwards (Huang et al., arXiv 1811.06965); all activations are kept until then."""
    yield from ((Kind.FORWARD, 0, index) for index in range(num_microbatches))
    yield from ((Kind.BACKWARD, 0, index) for index in range(num_microbatches))


def one_forward_one_backward(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Passes:
    """Yield the passes of 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2.1).

    Warm-up: a rank runs ahead by as many forwards as there are later ranks. Steady state: one forward, one backward,
    so that at most `num_ranks - rank` activations are alive. Cool-down: the remaining backwards.
    """
    order = [(0, index) for index in range(num_microbatches)]
    return _alternate(order, order, num_ranks - rank - 1)


def interleaved(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Passes:
    """Yield the passes of interleaved 1F1B (arXiv 2104.04473, section 2.2.2).

    The bubble is `num_chunks` times smaller, at the cost of more communication. Micro-batches go through the chunks in
    rounds of about one micro-batch per rank. A rank runs ahead by two forwards for each later rank, and by the first
    round through all chunks but one.
    """
    forwards, backwards = _both_ways(num_ranks, num_microbatches, num_chunks)
    ahead = (num_chunks - 1) * _rounds(num_ranks, num_microbatches)[0]
    return _alternate(forwards, backwards, ahead + 2 * (num_ranks - rank - 1))


def zero_bubble(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Passes:
    """Yield interleaved 1F1B with split backward passes (ZB-H1 of Qi et al., arXiv 2401.10241, section 3.1).

    Gradients of activations are computed first. Gradients of weights follow `rank` passes later and fill the bubble at
    the end. A rank runs ahead by one forward for each later rank instead of two as in `interleaved`, so that no more
    activations are alive.
    """
    forwards, backwards = _both_ways(num_ranks, num_microbatches, num_chunks)
    ahead = (num_chunks - 1) * _rounds(num_ranks, num_microbatches)[0] + num_ranks - rank - 1
    late: deque[tuple[int, int]] = deque()
    for kind, chunk, microbatch in _alternate(forwards, backwards, ahead):
        if kind is Kind.FORWARD:
            yield kind, chunk, microbatch
            continue
        yield Kind.BACKWARD_INPUT, chunk, microbatch
        late.append((chunk, microbatch))
        if len(late) > rank:
            yield Kind.BACKWARD_WEIGHT, *late.popleft()
    yield from ((Kind.BACKWARD_WEIGHT, *each) for each in late)


def zbv(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Passes:
    """Yield the passes of ZB-V (arXiv 2401.10241, section 6), which has almost no bubble.

    Each rank has two chunks, in the shape of a V, and keeps as many activations as in 1F1B. The rank with the first
    stage also has the last one, so that a micro-batch returns to where it started.
    """
    behind = num_ranks - rank
    later = num_microbatches - 2 * num_ranks + rank + 1  # forwards of the first chunk after the warm-up
    return _in_phases(
        (2 * behind - 1, "F0"),
        (rank, "F1 F0"),
        (behind, "F1 I1 W1"),
        (later, "F0 I0 W0 F1 I1 W1"),
        (behind - 1, "I0 W0 F1 I1 W1"),
        (rank, "I0 I1"),
        (behind, "I0 W0"),
        (rank, "W1"),
        (rank, "W0"),
    )


def dualpipev(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Passes:
    """Yield the passes of DualPipeV (DeepSeek-V3, arXiv 2412.19437, section 3.2.1, cut in half).

    Stages form a V in which forwards meet backwards: in the middle, a forward of one chunk runs next to a backward of
    the other chunk, and can hide the communication of that backward.
    """
    behind = num_ranks - rank - 1
    # The last backwards alternate between both chunks; the first half of them is whole, the rest is split.
    last = [f"{'B' if number <= rank else 'I'}{1 - number % 2}" for number in range(2 * rank + 2)]
    return _in_phases(
        (2 * behind, "F0"),
        (rank + 1, "F0 F1"),
        (behind, "I1 W F1"),
        (num_microbatches - 2 * num_ranks + rank + 1, "F0 B1 F1 B0"),
        (behind, "B1 F1 B0"),
        (1, " ".join(last)),
        (behind, "W I0"),
        (rank + 1, "W"),
    )


SCHEDULES: dict[str, Schedule] = {
    "1f1b": Schedule(one_forward_one_backward),
    "gpipe": Schedule(gpipe),
    "interleaved": Schedule(interleaved, chunks=None, least_chunks=2),
    "zero_bubble": Schedule(zero_bubble, chunks=None, splits_backward=True),
    "zbv": Schedule(zbv, chunks=2, in_v=True, splits_backward=True, least=lambda num_ranks: 2 * num_ranks - 1),
    "dualpipev": Schedule(dualpipev, chunks=2, in_v=True, splits_backward=True, least=lambda num_ranks: 2 * num_ranks),
}


def _rounds(num_ranks: int, num_microbatches: int) -> list[int]:
    """Return the sizes of the rounds of micro-batches: one micro-batch per rank or more, the larger rounds first."""
    count = max(1, num_microbatches // num_ranks)
    size, rest = divmod(num_microbatches, count)
    return [size + (index < rest) for index in range(count)]


def _in_rounds(num_ranks: int, num_microbatches: int, chunks: Iterable[int]) -> list[tuple[int, int]]:
    """Return (chunk, micro-batch) pairs: each round goes through all chunks."""
    order, start = [], 0
    chunks = list(chunks)
    for size in _rounds(num_ranks, num_microbatches):
        order += [(chunk, index) for chunk in chunks for index in range(start, start + size)]
        start += size
    return order


def _both_ways(
    num_ranks: int, num_microbatches: int, num_chunks: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (chunk, micro-batch) pairs of the forwards and of the backwards, each in order."""
    chunks = range(num_chunks)
    return tuple(_in_rounds(num_ranks, num_microbatches, way) for way in (chunks, reversed(chunks)))


def _alternate(forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], ahead: int) -> Passes:
    """Yield `ahead` forwards, then one forward and one backward in turn, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    yield from ((Kind.FORWARD, *each) for each in forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield Kind.FORWARD, *forward
        yield Kind.BACKWARD, *backward
    yield from ((Kind.BACKWARD, *each) for each in backwards[len(forwards) - ahead :])


def _in_phases(*phases: tuple[int, str]) -> Passes:
    """Yield phases of (repetitions, passes): `F1` is the next forward of chunk 1, `W` the weights of the oldest `I`."""
    done: Counter[str] = Counter()
    late: deque[tuple[int, int]] = deque()
    for times, passes in phases:
        for name in passes.split() * times:
            if name == "W":
                yield Kind.BACKWARD_WEIGHT, *late.popleft()
                continue
            kind, chunk = Kind(name[0]), int(name[1])
            # Whole backward passes and first halves of split ones take micro-batches from the same sequence.
            row = f"I{chunk}" if kind is Kind.BACKWARD else name
            yield kind, chunk, done[row]
            if kind is Kind.BACKWARD_INPUT:
                late.append((chunk, done[row]))
            done[row] += 1
