"""A sample of the fuzzer: a fixed number of random scripts of a few seeds, none of which may fail.

A failure prints the command that repeats the case; `docs/fuzzing.md` says how to read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from zoo_tests.campaigns.fuzz.campaign import command
from zoo_tests.campaigns.fuzz.case import Case
from zoo_tests.campaigns.fuzz.shrink import shrink
from zoo_tests.campaigns.fuzz.space import draw
from zoo_tests.campaigns.fuzz.trial import Outcome, Trials

_CASES = 4


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with closing(Trials()) as trials:
        yield trials


@pytest.mark.parametrize(
    "seed", [pytest.param(12, marks=pytest.mark.campaign), pytest.param(13, marks=pytest.mark.slow)]
)
def test_random_scripts(trials: Trials, seed: int) -> None:
    outcomes = {command(case): trials.run(case) for case in (draw(seed, index) for index in range(_CASES))}
    failures = {line: outcome.text for line, outcome in outcomes.items() if outcome.is_failure}
    assert not failures, "\n".join(f"{line}\n{text}" for line, text in failures.items())
    played = [outcome.kind for outcome in outcomes.values()]
    assert played.count("exact") >= 0.6 * _CASES, played
    assert "void" not in played, played


# What the fuzzer once found, as small as it became.
_FOUND = {
    "fewer key/value heads than ranks": {"family": "stablelm", "world_size": 4, "plugin": {"tp_size": 4}},
    "added in place": {
        "family": "falcon",
        "world_size": 2,
        "plugin": {"tp_size": 2, "microbatch_size": 1, "enable_sequence_parallelism": True},
    },
    "a column of one row": {"family": "splinter", "head": "question_answering", "world_size": 2, "padding": "none"},
    "a root in fp32": {
        "family": "deberta_v2_convolved",
        "head": "masked_lm",
        "config": {"num_attention_heads": 8},
        "plugin": {"enable_flash_attention": True},
        "optimizer": {"name": "SGD", "lr": 0.2, "groups": "one"},
        "precision": "fp64",
        "padding": "none",
        "rows": 8,
        "script": ({"do": "step", "data": 4, "rows": 8, "parts": 2},),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _FOUND)
def test_what_was_found_stays_exact(trials: Trials, name: str) -> None:
    step = {"do": "step", "data": 31, "rows": 2}
    case = Case(**{"head": "causal_lm", "precision": "fp32", "rows": 2, "script": (step,), **_FOUND[name]})
    outcome = trials.run(case)
    assert outcome.kind == "exact", outcome.text


@pytest.mark.slow
def test_another_learning_rate_is_noticed(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """One side is told another rate, in the eighth digit."""
    case = Case(family="llama", head="causal_lm", script=({"do": "step", "data": 0, "rows": 4},))
    assert trials.run(case).kind == "exact"
    submit = trials.worker.submit
    other = case.but(optimizer={**case.optimizer, "lr": case.optimizer["lr"] * (1 + 1e-7)})
    monkeypatch.setattr(trials.worker, "submit", lambda _, folder: submit(other, folder))
    assert trials.run(case).kind == "differs"


def test_shrinking_keeps_what_a_failure_needs() -> None:
    """Here: two tensor-parallel ranks, and a step behind a freeze."""

    def fails(case: Case) -> bool:
        actions = [action["do"] for action in case.script]
        return case.plugin.get("tp_size") == 2 and "freeze" in actions and "step" in actions[actions.index("freeze") :]

    def run(case: Case) -> Outcome:
        return Outcome("differs" if fails(case) else "exact", "", 0.0)

    failing = next(case for case in (draw(3, index) for index in range(2000)) if fails(case) and case.world_size == 4)
    smallest, _ = shrink(failing, run(failing), run, limit_s=60.0)
    assert [action["do"] for action in smallest.script] == ["freeze", "step"]
    assert smallest.world_size == 2 and dict(smallest.plugin) == {"tp_size": 2} and not smallest.config


def test_a_case_survives_json() -> None:
    case = draw(0, 0)
    assert Case.from_json(case.to_json()) == Case.from_json(Case.from_json(case.to_json()).to_json())
    assert draw(0, 0) == case and draw(0, 1) != case and draw(1, 0) != case
