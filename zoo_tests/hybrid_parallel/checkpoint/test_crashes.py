"""Saves that are killed: at every call, at any time, one rank or all; and the same with the discipline broken.

What breaks here first: a file that is visible before it is complete, or gone before its successor is. Look in
`plugins/hybrid_parallel/checkpoint/atomic_save.py`; `zoo_tests/campaigns/crashes` is the campaign.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo_tests.campaigns.crashes.campaign import carry_out, kills
from zoo_tests.campaigns.crashes.marked import MarkedTraining
from zoo_tests.campaigns.crashes.points import stop_at_every_call
from zoo_tests.campaigns.crashes.system_calls import SystemCalls
from zoo_tests.campaigns.crashes.victims import KILLED, KINDS, Kill, Nursery
from zoo_tests.harness.ranks import distributed, run_on_ranks


@pytest.fixture(scope="module")
def nursery() -> Nursery:
    nursery = Nursery()
    yield nursery
    nursery.stop()


@pytest.mark.slow
@pytest.mark.parametrize("number", [5, pytest.param(50, marks=pytest.mark.campaign)])
def test_ranks_are_killed_inside_of_saves(number: int, nursery: Nursery, tmp_path: Path) -> None:
    found = [carry_out(kill, tmp_path / str(index), nursery) for index, kill in enumerate(kills(number * 6 // 5))]
    outcomes = [outcome for outcome in found if outcome is not None][:number]
    assert len(outcomes) == number, "hardly a save was hit"
    wrong = [f"{outcome.kill}: {outcome.problems}, {outcome.hanging} hang" for outcome in outcomes]
    assert not [text for text, each in zip(wrong, outcomes, strict=True) if each.problems or each.hanging]
    published = sum(outcome.is_new for outcome in outcomes)
    assert (0 if number < 50 else 1) <= published < number, "some before and some after the moment"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_may_end_before_any_of_its_calls(kind: str, tmp_path: Path) -> None:
    calls, problems, published = run_on_ranks(1, stop_at_every_call, kind, tmp_path)[0]
    assert problems == []
    assert {"pwrite", "fsync", "rename"} <= set(calls) and 0 < published < len(calls)


@pytest.mark.slow
@pytest.mark.parametrize("control", ["manifest first", "old removed first", "same names for all saves"])
def test_without_the_discipline_the_same_finds_states_that_are_lost(control: str, tmp_path: Path) -> None:
    _, problems, _ = run_on_ranks(1, stop_at_every_call, "one name", tmp_path, control)[0]
    assert [problem for problem in problems if "holds no " in problem]


@pytest.mark.slow
def test_without_the_discipline_kills_find_states_that_are_lost(nursery: Nursery, tmp_path: Path) -> None:
    """The last calls of a save are those that publish it."""
    problems: tuple[str, ...] = ()
    for index in range(10):
        kill = Kill("one name", False, 2, 0, index % 2 == 0, "before a call", 0.99 - index / 40, "old removed first")
        outcome = carry_out(kill, tmp_path / str(index), nursery)
        problems += outcome.problems if outcome is not None else ()
        if problems:
            break
    assert "holds no " in " ".join(problems)


@distributed(1)
def test_everything_is_on_the_disk_before_its_name_is(tmp_path: Path) -> None:
    """What a power failure would take: kills do not show it, for the system keeps what a dead process has written."""
    training = MarkedTraining()
    training.save(tmp_path / "state", 1)
    for path in (tmp_path / "state", tmp_path / "new" / "deep" / "state"):
        with SystemCalls() as calls:
            training.save(path, 2)
        names = [name for name in calls.names if name not in ("posix_fallocate", "unlink", "rmdir")]
        made = ["mkdir", "fsync"] * 2 * ("new" in path.parts)
        data = ["mkdir", "open", *["pwrite"] * names.count("pwrite"), "fsync"]
        manifest = ["open", "fsync", "fsync", "rename"]  # its content, the directory with all names, the new name
        exchange = ["replace", "fsync", "replace", "fsync"] if path.parent == tmp_path else []
        assert names == [*made, *data, *manifest, *exchange, "fsync"]


def test_the_nursery_tells_how_ranks_end(nursery: Nursery, tmp_path: Path) -> None:
    kill = Kill("new names", False, 2, 1, False, "in a write", 0.5)
    (tmp_path / "round").mkdir()
    codes = nursery.lives(kill, tmp_path / "round")
    assert codes[1] == KILLED and codes[0] != KILLED
