"""The order in which the ranks of a pipeline send messages and post receives: one order for all ranks.

A kernel of NCCL blocks its stream until the other rank starts its half, and anything that waits for the whole device
(an allocator that returns memory, the first use of a kernel, autotuning) then waits for that rank too. If each rank
chose by itself when to post a receive, two ranks could wait for each other. Here all messages of a step are put into
one sequence, by the time at which a simulation of the schedule sends them. Each rank runs its actions, sends and
receives in the order of that sequence. The first unfinished message of the sequence then never waits for a later one,
even if each call blocks until its message has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plugins.hybrid_parallel.pipeline.schedule import Action, Kind
from plugins.hybrid_parallel.pipeline.simulate import TimedAction, simulate

_DURATIONS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}


@dataclass(frozen=True)
class Turn:
    """One action of a rank, and the receives around it.

    Attributes:
        action: the action.
        before_action: actions of this rank for which a receive is posted before this action runs.
        before_send: the same, after this action was launched and before its result is sent.
    """

    action: Action
    before_action: tuple[Action, ...] = ()
    before_send: tuple[Action, ...] = ()


def order_messages(tables: Sequence[Sequence[Action]]) -> list[list[Turn]]:
    """Return the turns of each rank. Messages between stages of one rank are left out.

    Args:
        tables: the actions of each rank.

    Raises:
        ValueError: if the ranks wait for each other forever.
    """
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
