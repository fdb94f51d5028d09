"""The tests that `make test-fast` leaves out although they are not marked slow: a list that a run of the suite writes.

A mark is an opinion of the test's author about what it proves; the seconds of a test are a fact about a machine. A test
that the list does not have is run.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

PAGE = Path(__file__).parents[1] / "long_tests.txt"
_LONG_S = 0.7  # seconds of a test function, in the mean of its parameters


class LongTests:
    """Plugin of pytest that writes the list from the seconds of a run.

    Args:
        write: whether to write it, at the end of the run.
        is_worker: whether this process runs tests for another one, which hears of all of them.
    """

    def __init__(self, write: bool, is_worker: bool) -> None:
        self.writes = write and not is_worker
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the seconds of a test that is not marked slow."""
        if report.when == "call" and "slow" not in report.keywords:
            self._seconds[function_of(report.nodeid)].append(report.duration)

    def pytest_sessionfinish(self) -> None:
        """Write the list."""
        if self.writes:
            long = sorted(name for name, seconds in self._seconds.items() if mean(seconds) > _LONG_S)
            PAGE.write_text("".join(f"{name}\n" for name in long), encoding="utf-8")


def long_tests() -> frozenset[str]:
    """The functions that the list names."""
    return frozenset(PAGE.read_text(encoding="utf-8").split())


def function_of(nodeid: str) -> str:
    """A test without its parameters."""
    return nodeid.partition("[")[0]
