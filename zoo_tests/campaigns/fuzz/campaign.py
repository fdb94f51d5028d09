"""Draws and plays cases for a while, shrinks what fails, and writes what was found."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from zoo_tests.campaigns.fuzz.case import Case
from zoo_tests.campaigns.fuzz.shrink import shrink
from zoo_tests.campaigns.fuzz.space import draw
from zoo_tests.campaigns.fuzz.trial import KINDS, Outcome, Trials

_SHRINK_S = 240.0
_COMMAND = "python -m zoo_tests.campaigns.fuzz --case"
_SHOWN = 1600  # characters of an error


@dataclass
class Found:
    """What came of the cases of one seed.

    Attributes:
        outcomes: kind -> cases.
        refusals: sentence -> cases.
        failures: command that repeats a failure -> its kind and first line.
        seconds: of every case.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.kind] += 1
        self.seconds.append(outcome.seconds)
        if outcome.kind == "refused":
            self.refusals[outcome.text] += 1


def run_seed(
    seed: int, first: int, cases: int, minutes: float, trials: Trials, say: Callable[[str], None], shrinks: bool = True
) -> Found:
    """Play the cases `first` to `first + cases` of a seed, or as many as fit into `minutes`.

    Args:
        say: gets a line for every case that is not exact.
        shrinks: whether failures are made smaller.
    """
    found, deadline = Found(), time.monotonic() + 60 * minutes
    for index in range(first, first + cases):
        if time.monotonic() > deadline:
            break
        case = draw(seed, index)
        outcome = trials.run(case)
        found.add(outcome)
        if outcome.kind != "exact":
            say(f"seed {seed}, case {index}: {outcome.kind}: {outcome.text.strip()[-_SHOWN:]}")
        if outcome.is_failure:
            say(f"    {command(case)}")
            if shrinks:
                case, outcome = shrink(case, outcome, trials.run, _SHRINK_S)
                say(f"  smallest: {outcome.text.strip()[-_SHOWN:]}\n    {command(case)}")
            found.failures[command(case)] = f"{outcome.kind}: {outcome.text.strip().splitlines()[0]}"
    return found


def command(case: Case) -> str:
    """The command that repeats a case."""
    quoted = case.to_json().replace("'", "'\\''")
    return f"{_COMMAND} '{quoted}'"


_HEADER = """# Random scripts

Written by `python -m zoo_tests.campaigns.fuzz --output docs/results/fuzz.md`; do not edit. Each case is a random
script, played by plain transformers and torch and by this library, see [the fuzzer](../fuzzing.md).

"""


def page(by_seed: dict[int, Found]) -> str:
    """Markdown: cases and outcomes by seed, failures, and refusals with their counts."""
    lines = [_HEADER + f"| seed | cases | {' | '.join(KINDS)} | median s |", "|---" * (len(KINDS) + 3) + "|"]
    for seed, found in by_seed.items():
        lines.append(f"| {seed} | {_row(found.outcomes, found.seconds)} |")
    total = sum((found.outcomes for found in by_seed.values()), Counter())
    seconds = [value for found in by_seed.values() for value in found.seconds]
    lines.append(f"| all | {_row(total, seconds)} |")
    failures = {key: value for found in by_seed.values() for key, value in found.failures.items()}
    if failures:
        lines += ["", "## Failures", "", *(f"- {text}\n\n      {each}\n" for each, text in failures.items())]
    refusals = sum((found.refusals for found in by_seed.values()), Counter())
    if refusals:
        lines += ["", "## Refused, in these words", "", "| cases | sentence |", "|---|---|"]
        lines += [f"| {count} | {_cell(sentence)} |" for sentence, count in refusals.most_common()]
    return "\n".join(lines) + "\n"


def _row(outcomes: Counter[str], seconds: list[float]) -> str:
    counts = [str(outcomes[kind]) for kind in KINDS]
    median = sorted(seconds)[len(seconds) // 2] if seconds else 0.0
    return " | ".join([str(outcomes.total()), *counts, f"{median:.1f}"])


def _cell(sentence: str) -> str:
    return " ".join(sentence.split()).replace("|", "\\|")
