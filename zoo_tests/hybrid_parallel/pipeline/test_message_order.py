"""Pipelines over NCCL do not deadlock, by a model of hosts, streams and communicators, and the model sees deadlocks.

What breaks here first: the order of sends and receives. Look in `plugins/hybrid_parallel/pipeline/timeline.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Action, Kind
from plugins.hybrid_parallel.pipeline.timeline import Turn, order_messages
from zoo_tests.hybrid_parallel.pipeline.host_programs import Call, Link, Step, host_programs, one_ahead
from zoo_tests.hybrid_parallel.pipeline.nccl_model import Rules, blocked_calls

# Hosts that wait at every call, with one stream per group: whatever is safe here is safe with fewer waits.
STRICTEST = Rules(communicators="bound", in_order=True, drains="calls")
EVERY_RULE = [
    Rules(communicators, in_order, drains)
    for communicators in ("lazy", "warm", "bound")
    for in_order in (False, True)
    for drains in ("never", "first", "actions", "calls", "random")
]


def _chunks_of(name: str) -> list[int]:
    schedule = SCHEDULES[name]
    return [chunks for chunks in (1, 2, 3) if chunks >= schedule.least_chunks and schedule.chunks in (None, chunks)]


def _steps(num_microbatches: int, equal: bool) -> list[Step]:
    """Two training steps, an evaluation and a third one; the micro-batches of a step are alike if `equal`."""
    one = tuple(0 if equal else index % 3 for index in range(num_microbatches))
    other = tuple(0 if equal else 5 + index * 7 % 4 for index in range(num_microbatches))
    return [Step(True, one), Step(True, other), Step(False, one), Step(True, one)]


def _sizes(name: str, ranks: Iterable[int], microbatches: Iterable[int]) -> Iterator[tuple[int, int, list[Step]]]:
    """Yield (ranks, chunks, steps)."""
    microbatches = list(microbatches)
    for num_ranks in ranks:
        for chunks in _chunks_of(name):
            for count in microbatches:
                yield from ((num_ranks, chunks, _steps(count, equal)) for equal in (True, False))


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_deadlock_if_every_call_waits_for_the_device(name: str) -> None:
    for num_ranks, chunks, steps in _sizes(name, (2, 3, 4), (1, 2, 5)):
        assert blocked_calls(host_programs(name, num_ranks, chunks, steps), STRICTEST) == {}, (num_ranks, chunks, steps)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_deadlock_under_any_rule(name: str) -> None:
    for num_ranks, chunks, steps in _sizes(name, (3,), (4,)):
        programs = host_programs(name, num_ranks, chunks, steps)
        for rules in EVERY_RULE:
            assert blocked_calls(programs, rules) == {}, (num_ranks, chunks, rules)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(list(SCHEDULES)), st.integers(2, 8), st.integers(1, 16), st.data())
def test_no_deadlock_at_any_size(name: str, num_ranks: int, microbatches: int, data: st.DataObject) -> None:
    _, chunks, steps = data.draw(st.sampled_from(list(_sizes(name, (num_ranks,), (microbatches,)))))
    assert blocked_calls(host_programs(name, num_ranks, chunks, steps), STRICTEST) == {}


@pytest.mark.campaign
@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_deadlock_at_all_sizes(name: str, num_ranks: int) -> None:
    for _, chunks, steps in _sizes(name, (num_ranks,), range(1, 17)):
        assert blocked_calls(host_programs(name, num_ranks, chunks, steps), STRICTEST) == {}, (chunks, steps)


# ----- what the order keeps -----


def _turns(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> list[list[Turn]]:
    return order_messages(
        [SCHEDULES[name].actions(rank, num_ranks, num_microbatches, chunks) for rank in range(num_ranks)]
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_message_is_received_once_and_before_it_is_needed(name: str) -> None:
    for chunks in _chunks_of(name):
        for turns in _turns(name, 4, 6, chunks):
            received: list[Action] = []
            for turn in turns:
                received += turn.before_action
                stage = turn.action.stage
                other = {Kind.FORWARD: stage - 1, Kind.BACKWARD_WEIGHT: stage}.get(turn.action.kind, stage + 1)
                exists = 0 <= other < 4 * chunks
                is_remote = exists and SCHEDULES[name].rank_of(other, 4) != SCHEDULES[name].rank_of(stage, 4)
                assert (turn.action in received) == is_remote, turn
                received += turn.before_send
            assert len(received) == len(set(received))


@pytest.mark.parametrize("name", SCHEDULES)
def test_both_ends_of_a_link_have_one_order(name: str) -> None:
    """Sends follow the actions, so each stage's receives of a kind must follow the order of micro-batches."""
    for chunks in _chunks_of(name):
        for turns in _turns(name, 3, 7, chunks):
            received = [each for turn in turns for each in (*turn.before_action, *turn.before_send)]
            for stage, forward in {(each.stage, each.kind is Kind.FORWARD) for each in received}:
                order = [
                    each.microbatch
                    for each in received
                    if each.stage == stage and (each.kind is Kind.FORWARD) == forward
                ]
                assert order == list(range(7)), (stage, forward)


def test_a_receive_is_posted_after_the_action_during_which_it_arrives() -> None:
    first, last = _turns("1f1b", 2, 3, 1)
    assert [(str(turn.action), _names(turn.before_action), _names(turn.before_send)) for turn in first] == [
        ("0F0", [], []),
        ("0F1", [], []),
        ("0B0", ["0B0"], []),
        ("0F2", [], []),
        ("0B1", ["0B1"], []),
        ("0B2", ["0B2"], []),
    ]
    assert [(str(turn.action), _names(turn.before_action), _names(turn.before_send)) for turn in last] == [
        ("1F0", ["1F0"], ["1F1"]),
        ("1B0", [], []),
        ("1F1", [], []),
        ("1B1", [], ["1F2"]),
        ("1F2", [], []),
        ("1B2", [], []),
    ]


def _names(actions: tuple[Action, ...]) -> list[str]:
    return [str(action) for action in actions]


# ----- what the model sees -----


@pytest.mark.parametrize(
    ("name", "num_ranks", "chunks", "num_microbatches", "equal", "rules"),
    [
        ("gpipe", 2, 1, 2, False, Rules("lazy")),
        ("interleaved", 2, 2, 1, True, Rules("lazy")),
        ("1f1b", 3, 1, 2, False, Rules("lazy")),
        ("1f1b", 2, 1, 2, True, Rules("lazy", drains="first")),
        ("1f1b", 2, 1, 2, True, Rules("warm", drains="actions")),
        ("interleaved", 3, 2, 5, False, Rules("bound", in_order=True)),
        ("zbv", 2, 2, 3, True, Rules("warm", drains="actions")),
        ("dualpipev", 2, 2, 4, True, Rules("warm", drains="actions")),
    ],
)
def test_a_receive_before_the_current_action_is_a_deadlock(
    name: str, num_ranks: int, chunks: int, num_microbatches: int, equal: bool, rules: Rules
) -> None:
    steps = _steps(num_microbatches, equal)
    assert blocked_calls(host_programs(name, num_ranks, chunks, steps, one_ahead), rules)
    assert not blocked_calls(host_programs(name, num_ranks, chunks, steps), rules)


def _message(kind: str, name: str, source: int, target: int, group: str | None = None) -> list[Call]:
    link = Link((group or name, 0, True), source, target, hash(name))
    return [*([Call("allocate", link)] if kind == "receive" else []), Call(kind, link)]


def test_two_ranks_that_create_communicators_in_another_order() -> None:
    one = [*_message("send", "a", 0, 1), *_message("receive", "b", 1, 0)]
    other = [*_message("send", "b", 1, 0), *_message("receive", "a", 0, 1)]
    assert [call.kind for call in blocked_calls([one, other], Rules("lazy")).values()] == ["send", "send"]
    assert blocked_calls([one, other], Rules("warm")) == {}
    assert blocked_calls([one, other], Rules("warm", drains="calls"))


def test_two_messages_that_cross_on_one_communicator() -> None:
    one = [*_message("send", "a", 0, 1, "c"), *_message("receive", "b", 1, 0, "c")]
    other = [*_message("send", "b", 1, 0, "c"), *_message("receive", "a", 0, 1, "c")]
    assert blocked_calls([one, other], Rules("bound")) == {0: None, 1: None}
    other = [*_message("receive", "a", 0, 1, "c"), *_message("send", "b", 1, 0, "c")]
    assert blocked_calls([one, other], Rules("bound")) == {}


def test_a_header_that_never_comes() -> None:
    link = Link(("a", 0, True), 0, 1, 0)
    assert blocked_calls([[], [Call("receive header", link)]], Rules()) == {1: Call("receive header", link)}
    assert blocked_calls([[Call("send header", link)], [Call("receive header", link)]], Rules()) == {}


def test_a_device_that_is_waited_for_while_a_receive_is_posted() -> None:
    action = Action(Kind.FORWARD, 0, 0)
    sender = [Call("run", None, action), *_message("send", "a", 0, 1), *_message("receive", "b", 1, 0)]
    receiver = [*_message("receive", "a", 0, 1), Call("run", None, action), *_message("send", "b", 1, 0)]
    assert blocked_calls([sender, receiver], Rules(drains="actions")) == {}
    sender = [*_message("receive", "b", 1, 0), Call("run", None, action), *_message("send", "a", 0, 1)]
    assert blocked_calls([sender, receiver], Rules()) == {}
    assert set(blocked_calls([sender, receiver], Rules(drains="actions"))) == {0, 1}
