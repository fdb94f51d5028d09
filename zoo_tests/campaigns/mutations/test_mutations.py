"""The tests notice faults: a sample of the mutants (all of them: `python -m zoo_tests.campaigns.mutations`).

The suite has one: a wrong weight of the loss.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zoo_tests.campaigns.mutations.__main__ import main
from zoo_tests.campaigns.mutations.edits import Edit
from zoo_tests.campaigns.mutations.mutants import MUTANTS

_REPOSITORY = Path(__file__).parents[3]
_SAMPLE = ("mean of means",)


def test_every_change_of_a_line_finds_its_line() -> None:
    edits = {name: mutant for name, mutant in MUTANTS.items() if isinstance(mutant, Edit)}
    assert edits
    for name, edit in edits.items():
        assert edit.changed_source(), name


@pytest.mark.slow
def test_the_tests_of_every_mutant_exist() -> None:
    tests = sorted({test for mutant in MUTANTS.values() for test in mutant.tests})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--campaigns", "--collect-only", *tests]
    found = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=300)
    assert "ERROR" not in found.stdout + found.stderr, found.stdout[-2000:] + found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("names", [_SAMPLE, pytest.param(tuple(MUTANTS), marks=pytest.mark.campaign)], ids=len)
def test_mutants_are_noticed(names: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "zoo_tests.campaigns.mutations", *names]
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=5400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(names)} of {len(names)} mutants noticed" in done.stdout


def test_a_name_that_is_no_mutant_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["nothing"])
    assert refused.value.code == 2
    assert "'nothing' is not a mutant" in capsys.readouterr().err
