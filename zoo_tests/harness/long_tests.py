"""What takes long, in lists that a run of the suite writes.

`long_tests.txt` has the functions that `make test-fast` leaves out although they are not marked slow: a mark is an
opinion of the test's author about what it proves; the seconds of a test are a fact about a machine. `slow_cases.txt`
has long cases of those that are marked, with their seconds: `--sample` runs these less often.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

PAGE = Path(__file__).parents[1] / "long_tests.txt"
SLOW_PAGE = PAGE.with_name("slow_cases.txt")
_LONG_S = 0.7  # seconds of a test function, in the mean of its parameters
_SLOW_S = 10.0  # seconds of a case that is marked slow


class LongTests:
    """Plugin of pytest that writes the lists from the seconds of a run.

    Args:
        write: whether to write them, at the end of the run.
        is_worker: whether this process runs tests for another one, which hears of all of them.
    """

    def __init__(self, write: bool, is_worker: bool) -> None:
        self.writes = write and not is_worker
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._slow: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the seconds of a test."""
        if report.when == "call" and "slow" in report.keywords:
            self._slow[report.nodeid] = report.duration
        elif report.when == "call":
            self._seconds[function_of(report.nodeid)].append(report.duration)

    def pytest_sessionfinish(self) -> None:
        """Write the lists; of slow cases that did not run, what was known stays."""
        if self.writes:
            long = sorted(name for name, seconds in self._seconds.items() if mean(seconds) > _LONG_S)
            PAGE.write_text("".join(f"{name}\n" for name in long), encoding="utf-8")
            slow = {name: took for name, took in sorted((slow_cases() | self._slow).items()) if took > _SLOW_S}
            SLOW_PAGE.write_text("".join(f"{took:.0f} {name}\n" for name, took in slow.items()), encoding="utf-8")


def long_tests() -> frozenset[str]:
    """The functions that are not marked, but long."""
    return frozenset(PAGE.read_text(encoding="utf-8").split())


def slow_cases() -> dict[str, float]:
    """Long cases of tests that are marked -> seconds."""
    lines = SLOW_PAGE.read_text(encoding="utf-8").splitlines()
    return {name: float(took) for took, name in (line.split(" ", 1) for line in lines)}


def function_of(nodeid: str) -> str:
    """A test without its parameters."""
    return nodeid.partition("[")[0]
