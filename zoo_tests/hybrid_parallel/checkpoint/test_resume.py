"""Training that is interrupted in the middle of an epoch and goes on in fresh processes, as if nothing had happened.

What breaks here first: a random number drawn from somewhere that the checkpoint does not know. Look in
`plugins/hybrid_parallel/data/dataloader.py` and `plugins/hybrid_parallel/checkpoint/training_state.py`.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from zoo_tests.campaigns.resume import FORGOTTEN, TRIED, Trace, case_of, fresh, interrupt, steps_of
from zoo_tests.harness.case import Case
from zoo_tests.harness.ranks import RankError


@lru_cache
def _uninterrupted(case: Case) -> list[Trace]:
    return fresh(case, Path("unused"), True, None)


_INTERRUPTED = [(layout, "fp32") for layout in TRIED] + [("dp2", "fp16"), ("tp2pp2", "fp16"), ("tp2pp2", "bf16")]
# Each axis and each precision once; the campaign has the other layouts.
_SUITE = (("single", "fp32"), ("dp2", "fp16"), ("tp2pp2", "bf16"))


@pytest.mark.parametrize(
    ("layout", "precision"),
    [pytest.param(*case, marks=pytest.mark.slow if case in _SUITE else pytest.mark.campaign) for case in _INTERRUPTED],
)
def test_goes_on_with_the_very_same_bits(layout: str, precision: str, tmp_path: Path) -> None:
    case = case_of(layout, precision)
    whole = _uninterrupted(case)
    stop = steps_of(case) // 2 + 1  # in the second of three epochs
    resumed = interrupt(case, stop, whole, tmp_path)
    assert len(resumed.before[0]) == stop
    assert resumed.is_exact
    if precision == "fp16":
        scales = {step[3] for step in whole[0][:-1]}
        assert len(scales) > 2, "the loss scale is to have moved"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two replicas in the middle of the second epoch."""
    folder, case = tmp_path_factory.mktemp("saved"), case_of("dp2", "fp16")
    fresh(case, folder / "state", True, steps_of(case) // 2 + 1)
    assert fresh(case, folder / "state", False, None) == _rest(case)
    return folder


def _rest(case: Case) -> list[Trace]:
    return [trace[steps_of(case) // 2 + 1 :] for trace in _uninterrupted(case)]


@pytest.mark.parametrize(
    "field",
    [
        pytest.param(field, marks=pytest.mark.campaign if number % 5 else pytest.mark.slow)
        for number, field in enumerate(FORGOTTEN)
    ],
)
def test_every_field_of_the_state_is_needed(field: str, saved: Path) -> None:
    """Training without it may fail, or differ; it never goes unnoticed."""
    case = case_of("dp2", "fp16")
    try:
        found = fresh(case, saved / "state", False, None, field)
    except RankError:
        return
    assert found != _rest(case)
