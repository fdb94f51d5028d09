"""The sample of slow tests: 32 commits run them all, and eight a case of every function.

What fails here first: a seed that stays the same, and a function that no sample runs.
"""

from __future__ import annotations

import subprocess
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

from zoo_tests.conftest import pytest_report_header
from zoo_tests.harness.sample import LONG_SHARES, SHARES, TURNS, sampled, sampled_of_long, seed_of_commit

_FUNCTIONS = {"a.py::test_many": 40, "a.py::test_few": 3, "b.py::test_one": 1, "b.py::test_mixed": 2}
_SLOW = [f"{name}[{case}]" for name, cases in _FUNCTIONS.items() for case in range(cases)]
_OTHERS = ["b.py::test_mixed[fast]", "c.py::test_fast"]


@pytest.mark.parametrize("first", [0, 5, 1174])
def test_consecutive_seeds_run_all(first: int) -> None:
    samples = [sampled(_SLOW, _OTHERS, seed, ()) for seed in range(first, first + SHARES)]
    assert set(chain(*samples)) == set(_SLOW)
    counts = [sum(name.startswith("a.py::test_many") for name in sample) for sample in samples]
    assert sum(counts) == 40 and max(counts) - min(counts) <= 1, "each case runs once, and none in a crowd"
    assert samples[0] == sampled(_SLOW, _OTHERS, first + SHARES, ())


@pytest.mark.parametrize("seed", range(SHARES))
def test_each_function_has_a_case_in_a_few_commits(seed: int) -> None:
    samples = chain(*(sampled(_SLOW, _OTHERS, each, ()) for each in range(seed, seed + TURNS)))
    functions = {name.partition("[")[0] for name in (*samples, *_OTHERS)}
    assert functions >= _FUNCTIONS.keys()


def test_a_long_case_runs_with_its_share_alone() -> None:
    samples = [sampled(_SLOW, _OTHERS, seed, {"a.py::test_few[0]", "b.py::test_one[0]"}) for seed in range(SHARES)]
    few = [[name for name in sample if "test_few" in name] for sample in samples]
    assert few.count(["a.py::test_few[1]"]) > 1, few
    assert ["a.py::test_few[0]"] in few and ["a.py::test_few[2]"] in few
    assert sum("b.py::test_one[0]" in sample for sample in samples) == 1


@pytest.mark.parametrize("seed", [0, 5, 1174])
def test_each_commit_runs_a_part_of_the_cases_of_a_long_function(seed: int) -> None:
    samples = [sampled_of_long(_SLOW, each) for each in range(seed, seed + LONG_SHARES)]
    assert set(chain(*samples)) == set(_SLOW)
    for sample in samples:
        counts = {function: sum(name.startswith(function) for name in sample) for function in _FUNCTIONS}
        assert list(counts.values()) == [10, 1, 1, 1]


def test_the_seed_counts_commits(tmp_path: Path) -> None:
    """Also where git does not know them all, and where there is no git."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True)

    whole, shallow = tmp_path / "whole", tmp_path / "shallow"
    git("init", str(whole))
    for number in range(1, 4):
        git("-C", str(whole), "commit", "--allow-empty", "-m", f"commit {number}")
        assert seed_of_commit(whole) == number
    git("clone", "--depth", "1", f"file://{whole}", str(shallow))
    seeds = [seed_of_commit(shallow)]
    git("-C", str(whole), "commit", "--allow-empty", "-m", "another")
    git("-C", str(shallow), "fetch", "--depth", "1")
    git("-C", str(shallow), "reset", "--hard", "FETCH_HEAD")
    seeds.append(seed_of_commit(shallow))
    assert len(set(seeds)) == 2 and min(seeds) > 4, "names of commits, not the one commit that a shallow clone has"
    assert seed_of_commit(tmp_path) == 0


def test_a_run_says_how_to_repeat_it() -> None:
    options = {"--sample": True, "--sample-seed": 21}
    header = pytest_report_header(SimpleNamespace(getoption=options.get))
    assert header == f"sample {21 % SHARES} of {SHARES} of the slow tests; repeat it with --sample --sample-seed 21"
