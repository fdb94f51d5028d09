"""Which of the slow tests `--sample` runs: another one of 32 parts of them at each commit, and in eight all functions.

Functions that only have long cases wait for the commit that has them in its part: a run of CI has 10 minutes. The seed
is the number of commits up to this one, so that any 32 consecutive commits run all tests. The header of a run says it,
and `--sample-seed` repeats the sample.
"""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path

from zoo_tests.harness.long_tests import function_of

SHARES = 32
TURNS = 8  # consecutive commits, of which one runs a function that has no case in its share
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
    cases: dict[str, list[str]] = {}
    for name in slow:
        cases.setdefault(function_of(name), []).append(name)
    has_others = {function_of(name) for name in others}
    chosen = set()
    for function, names in cases.items():
        first = zlib.crc32(function.encode())  # functions with few cases are not all in the first shares
        share = [name for place, name in enumerate(names, start=first) if (place - seed) % SHARES == 0]
        if not share and function not in has_others and (first - seed) % TURNS == 0:
            share = [name for name in names if name not in long][:1]
        chosen.update(share)
    return chosen
