"""`python -m zoo_tests.campaigns.crashes`: kill ranks inside of saves, damage files, and write what was found.

    python -m zoo_tests.campaigns.crashes [--kills 500] [--damages 1000] [--output docs/results/crash_campaign.md]

Exit code 1 when anything was unreadable, partial, undetected, or hung.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from zoo_tests.campaigns.crashes.campaign import Outcome, carry_out, kills
from zoo_tests.campaigns.crashes.damage import save_some, undetected
from zoo_tests.campaigns.crashes.victims import KINDS, MOMENTS, Nursery
from zoo_tests.harness.ranks import run_on_ranks, stop_pools

_HEADER = """# Checkpoints under fire

Written by `python -m zoo_tests.campaigns.crashes --output docs/results/crash_campaign.md`; do not edit.
"""
_KILLS = """
## Ranks killed inside of a save

SIGKILL to one rank or to all, before a call that changes files, in the middle of a write, or at a time within the save,
spread evenly over it. Afterwards other ranks look: `resume="latest"` has to give the save that was complete before or
the one that was hit, every number in it from that one step; every checkpoint in the folder has to load; the next save
has to succeed and to leave nothing else behind.
"""
_DAMAGES = """
## Damaged files

One file of a complete checkpoint of 2 ranks, the manifest included, is damaged; verification has to refuse it and to
name the file.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="Markdown page to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crashes-") as directory:
        outcomes = _kill(arguments.kills, arguments.seed, Path(directory))
        run_on_ranks(2, save_some, Path(directory) / "damaged")
        done, missed = undetected(Path(directory) / "damaged", arguments.damages, arguments.seed)
    rows = [[kind, number, sum(text.startswith(kind) for text in missed)] for kind, number in done.items()]
    rows.append(["all", done.total(), len(missed)])
    page = _HEADER + _KILLS + _table(_COLUMNS, _rows(outcomes))
    page += _DAMAGES + _table(["damage", "times", "not noticed"], rows)
    sys.stdout.write(page)
    if arguments.output is not None:
        arguments.output.write_text(page)
    stop_pools()
    wrong = [f"{outcome.kill}: {outcome.problems}" for outcome in outcomes if outcome.problems or outcome.hanging]
    sys.stderr.write("".join(f"{line}\n" for line in [*wrong, *missed]))
    sys.exit(1 if wrong or missed else 0)


def _kill(number: int, seed: int, directory: Path) -> list[Outcome]:
    """Carry out kills until `number` of them have met a save."""
    nursery, outcomes = Nursery(), []
    for index, kill in enumerate(kills(2 * number, seed)):
        if len(outcomes) == number:
            break
        outcome = carry_out(kill, directory / str(index), nursery)
        if outcome is not None:
            outcomes.append(outcome)
            sys.stderr.write(f"{len(outcomes)}/{number} {outcome.kill} {'new' if outcome.is_new else 'old'}\n")
            sys.stderr.writelines(f"    {problem}\n" for problem in outcome.problems)
    nursery.stop()
    return outcomes


_COLUMNS = ["saves", "ranks", "written", "kills", "found the save before", "the one that was hit", "wrong", "hanging"]


def _rows(outcomes: Sequence[Outcome]) -> list[list[object]]:
    rows: list[list[object]] = []
    for kind, world_size, asynchronous in itertools.product(KINDS, (1, 2, 4), (False, True)):
        chosen = [
            outcome
            for outcome in outcomes
            if (outcome.kill.kind, outcome.kill.world_size, outcome.kill.asynchronous)
            == (kind, world_size, asynchronous)
        ]
        rows.append([kind, world_size, "beside training" if asynchronous else "at once", *_counts(chosen)])
    for moment in MOMENTS:
        rows.append(["all", "", moment, *_counts([each for each in outcomes if each.kill.moment == moment])])
    rows.append(["all", "", "", *_counts(outcomes)])
    return rows


def _counts(outcomes: Sequence[Outcome]) -> list[object]:
    new = sum(outcome.is_new for outcome in outcomes)
    wrong, hanging = sum(bool(outcome.problems) for outcome in outcomes), sum(outcome.hanging for outcome in outcomes)
    return [len(outcomes), len(outcomes) - new, new, wrong, hanging]


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n" + "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


if __name__ == "__main__":
    main()
