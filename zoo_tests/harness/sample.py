"""Which tests `--sample` runs: all short ones, a quarter of the cases of a long function, one of 32 of the slow cases.

Each commit has other cases: in eight commits each slow function runs, in 32 every case. Functions that only have long
cases wait for the commit that has them in its part: a run of CI has 10 minutes. The seed is the number of commits up to
this one. The header of a run says it, and `--sample-seed` repeats the sample.
"""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path

from zoo_tests.harness.long_tests import function_of

SHARES = 32
TURNS = 8  # consecutive commits, of which one runs a function that has no case in its share
LONG_SHARES = 4  # of the cases of a function that is long, though not marked
_REPOSITORY = Path(__file__).resolve().parents[2]


def seed_of_commit(repository: Path = _REPOSITORY) -> int:
    """The number of commits up to the one that is checked out; 0 without git.

    A shallow clone does not know the number: there it is one made from the commit's name.
    """
    try:
        shallow, name = _git(repository, "rev-parse", "--is-shallow-repository", "HEAD").split()
        number = _git(repository, "rev-list", "--count", "--first-parent", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(name[:8], 16) if shallow == "true" else int(number)


def _git(repository: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True, check=True)
    return done.stdout


def sampled(slow: Iterable[str], others: Collection[str], seed: int, long: Collection[str]) -> set[str]:
    """The slow tests that run.

    Args:
        slow: their names, in the order of the suite.
        others: names of the tests that are not slow, all of which run.
        seed: number of the sample; the same again after `SHARES`.
        long: those of the slow that take long. Where the share has no case of a function, the first that is not one of
            them runs in its turn.
    """
    has_others = {function_of(name) for name in others}
    chosen = set()
    for function, names in _by_function(slow).items():
        first = _first_place(function)
        share = [name for place, name in enumerate(names, start=first) if (place - seed) % SHARES == 0]
        if not share and function not in has_others and (first - seed) % TURNS == 0:
            share = [name for name in names if name not in long][:1]
        chosen.update(share)
    return chosen


def sampled_of_long(names: Iterable[str], seed: int) -> set[str]:
    """Of the tests that belong to long functions, those that run: every fourth case, and one case of each function."""
    chosen = set()
    for function, cases in _by_function(names).items():
        start = (seed - _first_place(function)) % min(LONG_SHARES, len(cases))
        chosen.update(cases[start::LONG_SHARES])
    return chosen


def _by_function(names: Iterable[str]) -> dict[str, list[str]]:
    cases: dict[str, list[str]] = {}
    for name in names:
        cases.setdefault(function_of(name), []).append(name)
    return cases


def _first_place(function: str) -> int:
    """Functions with few cases are not all in the first shares."""
    return zlib.crc32(function.encode())
