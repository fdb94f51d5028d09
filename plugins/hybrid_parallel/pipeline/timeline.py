"""Timelines of a pipeline's actions, simulated or recorded in training; the order of messages by the simulated one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh
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
    """Timeline of a whole step, rank by rank."""

    ranks: Sequence[Sequence[TimedAction]]  # the actions of each rank, in order

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


_DURATIONS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}


@dataclass(frozen=True)
class Turn:
    """One action of a rank, and the receives around it."""

    action: Action
    before_action: tuple[Action, ...] = ()  # actions of this rank for which a receive is posted before this action runs
    before_send: tuple[Action, ...] = ()  # the same, after this action was launched and before its result is sent


def order_messages(tables: Sequence[Sequence[Action]]) -> list[list[Turn]]:
    """Return each rank's turns without messages inside a rank; ValueError if the actions in `tables` deadlock."""
    timeline = simulate(tables, lambda action: _DURATIONS[action.kind])
    rank_of = {action: rank for rank, table in enumerate(tables) for action in table}
    sent = sorted((timed for rank in timeline.ranks for timed in rank), key=_time_of_message)
    before_action: dict[Action, list[Action]] = {action: [] for action in rank_of}
    before_send: dict[Action, list[Action]] = {action: [] for action in rank_of}
    reached = [0] * len(tables)  # by rank: number of actions that began before the message
    for message in sent:
        receiver = _receiver(message.action, rank_of)
        if receiver is None or rank_of[receiver] == rank_of[message.action]:
            continue
        rank = rank_of[receiver]
        own = timeline.ranks[rank]
        while own[reached[rank]].begin < message.end:
            reached[rank] += 1
        last = own[reached[rank] - 1] if reached[rank] else None
        if last is not None and _time_of_message(message) < _time_of_message(last):
            before_send[last.action].append(receiver)
        else:
            before_action[own[reached[rank]].action].append(receiver)
    return [
        [Turn(action, tuple(before_action[action]), tuple(before_send[action])) for action in table] for table in tables
    ]


def split_at_backward(turns: Sequence[Turn]) -> tuple[list[Turn], list[Turn]]:
    """Split turns that run all forwards before all backwards into two sequences, which run at different times.

    Receives of gradients that would be posted among the forwards are posted before the first backward, in their order.
    """
    first = next((index for index, turn in enumerate(turns) if turn.action.kind is not Kind.FORWARD), len(turns))
    forwards, backwards = turns[:first], list(turns[first:])
    early = [each for turn in forwards for each in (*turn.before_action, *turn.before_send) if not _is_forward(each)]
    if early:
        turn = backwards[0]
        backwards[0] = Turn(turn.action, (*early, *turn.before_action), turn.before_send)
    kept = [
        Turn(turn.action, tuple(filter(_is_forward, turn.before_action)), tuple(filter(_is_forward, turn.before_send)))
        for turn in forwards
    ]
    return kept, backwards


def _is_forward(action: Action) -> bool:
    return action.kind is Kind.FORWARD


def _time_of_message(timed: TimedAction) -> tuple[float, int]:
    """Return the place of an action's message in the sequence; no two actions have the same."""
    return timed.end, timed.action.stage


def _receiver(action: Action, known: dict[Action, int]) -> Action | None:
    """Return the action that waits for the result of `action`; None if no stage does."""
    if action.kind is Kind.BACKWARD_WEIGHT:
        return None
    if action.kind is Kind.FORWARD:
        following = Action(Kind.FORWARD, action.stage + 1, action.microbatch)
        return following if following in known else None
    halves = (Action(kind, action.stage - 1, action.microbatch) for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT))
    return next((half for half in halves if half in known), None)


class ScheduleRecorder:
    """Records the times of a pipeline's actions; on a GPU, device times.

    Each step starts with a barrier of the pipeline's ranks, which is time 0 for all of them. Only one pipeline is
    recorded: the first replica's, on the first tensor-parallel ranks.

    Args:
        directory: receives a file of JSON lines for each rank of the pipeline.
    """

    def __init__(self, directory: Path, mesh: HybridMesh) -> None:
        self._mesh = mesh
        self._is_first = mesh.rank(DP_CP) == mesh.rank("tp") == 0
        self._path = directory / f"rank{mesh.rank('pp')}.jsonl"
        self._step = 0
        self._marks: list[tuple[Action, Any, Any]] | None = None  # of the present step
        if self._is_first:
            directory.mkdir(parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record a training step."""
        self._step, self._marks = self._step + 1, []
        dist.barrier(group=self._mesh.group("pp"))
        begin = self._now()
        yield
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize()
        if self._is_first:
            actions = [
                [
                    action.kind.value,
                    action.stage,
                    action.microbatch,
                    self._between(begin, start),
                    self._between(begin, end),
                ]
                for action, start, end in self._marks
            ]
            with self._path.open("a") as file:
                file.write(json.dumps({"step": self._step, "actions": actions}) + "\n")
        self._marks = None

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Record one action, from the time its inputs have arrived."""
        start = self._now()
        yield
        if self._marks is not None:
            self._marks.append((action, start, self._now()))

    def _now(self) -> Any:
        if self._mesh.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def _between(begin: Any, end: Any) -> float:
        """Return the milliseconds between two times."""
        return (end - begin) * 1e3 if isinstance(begin, float) else begin.elapsed_time(end)


def read_timelines(directory: Path) -> dict[int, Timeline]:
    """Read the timeline of each recorded step, in milliseconds."""
    paths = sorted(directory.glob("rank*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank")))
    if not paths:
        raise ConfigurationError(
            f"{directory} holds no recording; train with HybridParallelPlugin(record_schedule=...) first"
        )
    try:
        ranks = [{line["step"]: _timed(line["actions"]) for line in map(json.loads, path.open())} for path in paths]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"the recording in {directory} is damaged ({error}); record it again") from error
    steps = sorted(set.intersection(*map(set, ranks)))
    if not steps:
        raise ConfigurationError(f"the recording in {directory} has no step of all ranks; let one step finish")
    return {step: Timeline([rank[step] for rank in ranks]) for step in steps}


def _timed(actions: list[list[Any]]) -> list[TimedAction]:
    return [TimedAction(Action(Kind(kind), stage, index), begin, end) for kind, stage, index, begin, end in actions]
