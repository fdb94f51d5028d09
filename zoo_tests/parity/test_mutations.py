"""The tests notice faults: all mutants of `zoo_tests.mutants` (by hand: `python -m zoo_tests.mutations`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zoo_tests.mutants import MUTANTS

_REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_mutant_is_noticed() -> None:
    command = [sys.executable, "-m", "zoo_tests.mutations"]
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(MUTANTS)} of {len(MUTANTS)} mutants noticed" in done.stdout


@pytest.mark.slow
def test_a_name_that_is_no_mutant_is_refused() -> None:
    command = [sys.executable, "-m", "zoo_tests.mutations", "nothing"]
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "'nothing' is not a mutant" in done.stderr
