"""Breaks the library in one place at a time and shows that the tests notice it.

`python -m zoo_tests.campaigns.mutations [name ...]`. First the chosen tests have to pass on the library as it is. Then
each mutant starts its own ranks, and every one of its tests has to fail, by a comparison: a mutant that raises or hangs
proves nothing. Exit code 1 when a mutant survives one of its tests.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from zoo_tests.campaigns.mutations.mutants import MUTANTS
from zoo_tests.harness.ranks import use_mutant

_REPOSITORY = Path(__file__).parents[3]
# A mutant's test may be a campaign's: the suite's sample moves on when a family is added.
_OPTIONS = ("-q", "-p", "no:cacheprovider", "--campaigns", f"--rootdir={_REPOSITORY}")
_FAILED_RANK = re.compile(r"^----- rank \d+ failed$", re.MULTILINE)


class _Outcomes:
    """A pytest plugin that remembers which tests passed, which failed by a comparison and which broke down.

    Attributes:
        passed: tests.
        failed, broken: test -> first line of the message.
    """

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}
        self.broken: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            message = report.longrepr.reprcrash.message
            by_comparison = report.when == "call" and all(map(_is_comparison, _errors_in(message)))
            (self.failed if by_comparison else self.broken)[report.nodeid] = _errors_in(message)[0]
        elif report.when == "call":
            self.passed.append(report.nodeid)


def _errors_in(message: str) -> list[str]:
    """First lines of the errors of all ranks that failed; of the only one of a test that failed beside the ranks."""
    tracebacks = _FAILED_RANK.split(message)[1:]
    return [_raised(each) for each in tracebacks] or [message.splitlines()[0]]


def _raised(traceback: str) -> str:
    """The line behind the last frame: the first that is not indented."""
    _, *behind = traceback.rpartition('\n  File "')[2].splitlines()
    return next((line for line in behind if line.strip() and not line.startswith(" ")), "no error")


def _is_comparison(error: str) -> bool:
    return error.startswith(("AssertionError", "assert "))


def run_tests(tests: Sequence[str]) -> _Outcomes:
    """Run tests in this process, silently.

    Raises:
        RuntimeError: one of them was not found, so that nothing can be said.
    """
    outcomes, output = _Outcomes(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), contextlib.chdir(_REPOSITORY):
        pytest.main([*_OPTIONS, *tests], plugins=[outcomes])
    if len(outcomes.passed) + len(outcomes.failed) + len(outcomes.broken) != len(tests):
        raise RuntimeError(f"not every test ran:\n{output.getvalue()}")
    return outcomes


def _find_tests(tests: Sequence[str]) -> None:
    """Raises RuntimeError where a test of any mutant is not there: it may have got another name."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), contextlib.chdir(_REPOSITORY):
        code = pytest.main([*_OPTIONS, "--collect-only", *tests])
    if code != pytest.ExitCode.OK:
        raise RuntimeError(f"not every test of a mutant was found:\n{output.getvalue()}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutants that are named, or all."""
    parser = argparse.ArgumentParser(
        prog="python -m zoo_tests.campaigns.mutations", description=__doc__.splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="name", help=f"one of: {', '.join(MUTANTS)}; all by default")
    names = parser.parse_args(arguments).names or list(MUTANTS)
    for name in names:
        if name not in MUTANTS:
            parser.error(f"'{name}' is not a mutant; use one of: {', '.join(MUTANTS)}")
    use_mutant(None)
    _find_tests(sorted({test for mutant in MUTANTS.values() for test in mutant.tests}))
    sound = run_tests(sorted({test for name in names for test in MUTANTS[name].tests}))
    if sound.failed or sound.broken:
        print("these tests fail without any mutant:", *sound.failed, *sound.broken, sep="\n  ")
        return 1
    survivors = [name for name in names if not _is_noticed(name)]
    print(
        f"{len(names) - len(survivors)} of {len(names)} mutants noticed"
        + "".join(f"\n  survived: {n}" for n in survivors)
    )
    return 1 if survivors else 0


def _is_noticed(name: str) -> bool:
    """Whether every test of a mutant fails by a comparison; prints its lines of the table."""
    start = time.monotonic()
    use_mutant(name)
    outcomes = run_tests(MUTANTS[name].tests)
    use_mutant(None)
    noticed = len(outcomes.failed) == len(MUTANTS[name].tests)
    print(f"{name:<57} {'noticed' if noticed else 'SURVIVED':<9} {time.monotonic() - start:5.1f} s", flush=True)
    for test in outcomes.passed:
        print(f"    passes {_short(test)}")
    for verdict, messages in (("breaks", outcomes.broken), ("fails ", outcomes.failed)):
        for test, message in messages.items():
            print(f"    {verdict} {_short(test)}: {message[:100]}")
    return noticed


def _short(test: str) -> str:
    return test.rpartition("::")[2]


if __name__ == "__main__":
    sys.exit(main())
