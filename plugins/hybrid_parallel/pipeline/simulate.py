"""Simulation of a pipeline schedule: the time of every action, given the duration of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from plugins.hybrid_parallel.pipeline.schedule import Action, Kind

_HALVES = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True)
class TimedAction:
    """An action with its begin and end, in the unit of the durations."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Timeline of a whole step, rank by rank.

    Attributes:
        ranks: the actions of each rank, in order.
    """

    ranks: Sequence[Sequence[TimedAction]]

    @property
    def length(self) -> float:
        """Time until the last action ends."""
        return max((timed.end for rank in self.ranks for timed in rank), default=0.0)

    @property
    def bubbles(self) -> list[float]:
        """Fraction of the step in which each rank is idle."""
        busy = [sum(timed.end - timed.begin for timed in rank) for rank in self.ranks]
        return [1 - each / self.length if self.length else 0.0 for each in busy]

    @property
    def peaks(self) -> list[int]:
        """Maximum number of stage activations that each rank holds, from a forward to the end of its backward pass."""
        return [_peak(timed.action for timed in rank) for rank in self.ranks]


def simulate(
    tables: Sequence[Sequence[Action]],
    duration: Callable[[Action], float],
    latency: Callable[[int, int], float] = lambda source, target: 0.0,
) -> Timeline:
    """Simulate ranks that run their actions in order, each action as soon as its inputs have arrived.

    Args:
        tables: the actions of each rank.
        duration: returns how long an action takes.
        latency: (rank, other rank) -> how long a message between them takes, while both continue.

    Raises:
        ValueError: if the ranks wait for each other forever; the message names the actions.
    """
    rank_of = {action: rank for rank, table in enumerate(tables) for action in table}
    last_stage = max((action.stage for action in rank_of), default=0)
    ends: dict[Action, float] = {}
    done: list[list[TimedAction]] = [[] for _ in tables]
    waiting = [rank for rank, table in enumerate(tables) if table]
    while waiting:
        progress = False
        for rank in waiting:
            while len(done[rank]) < len(tables[rank]):
                action = tables[rank][len(done[rank])]
                needs = list(_needs(action, last_stage, rank_of))
                if not all(need in ends for need in needs):
                    break
                arrivals = [ends[need] + _between(latency, rank_of[need], rank) for need in needs]
                begin = max([*arrivals, done[rank][-1].end if done[rank] else 0.0])
                ends[action] = begin + duration(action)
                done[rank].append(TimedAction(action, begin, ends[action]))
                progress = True
        waiting = [rank for rank in waiting if len(done[rank]) < len(tables[rank])]
        if waiting and not progress:
            heads = [str(tables[rank][len(done[rank])]) for rank in waiting]
            raise ValueError(f"ranks {waiting} wait for each other, in front of {heads}")
    return Timeline(done)


def _needs(action: Action, last_stage: int, known: dict[Action, int]) -> Iterator[Action]:
    """Yield the actions that must end before this one."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        if stage > 0:
            yield Action(Kind.FORWARD, stage - 1, microbatch)
    elif action.kind is Kind.BACKWARD_WEIGHT:
        yield Action(Kind.BACKWARD_INPUT, stage, microbatch)
    else:
        yield Action(Kind.FORWARD, stage, microbatch)
        if stage < last_stage:
            either = (Action(kind, stage + 1, microbatch) for kind in _HALVES)
            yield next((each for each in either if each in known), Action(Kind.BACKWARD, stage + 1, microbatch))


def _between(latency: Callable[[int, int], float], source: int, target: int) -> float:
    return 0.0 if source == target else latency(source, target)


def _peak(actions: Iterator[Action]) -> int:
    alive = peak = 0
    for action in actions:
        alive += (action.kind is Kind.FORWARD) - (action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
        peak = max(peak, alive)
    return peak
