"""How failures end: `python -m zoo_tests.campaigns.faults [--repetitions N] [--only FAULT] [--output FILE]`.

Each fault strikes in jobs of four ranks (tensor parallel 2 x data parallel 2, or 2 stages x tensor parallel 2), in turn
on every rank and in every place. The table says how often the fault was named within 10 s with its rank and
operation, and how often all processes were gone 5 s later. `--cluster` has faults of the network instead (`links.py`),
`--healthy` jobs without a fault (`false_alarms.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness import table
from zoo_tests.campaigns.faults import false_alarms, links
from zoo_tests.campaigns.faults.watch import Outcome, WatchedJob

NAMED_WITHIN_S = 10.0
GONE_WITHIN_S = 5.0
FAULTS = ("killed", "stopped", "raising", "skipping")
PLACES = ("execute_pipeline", "step", "save", "loader", "boost")
LAYOUTS = ({"tp_size": 2}, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2})
_PAGE = """# Faults

Written by `python -m zoo_tests.campaigns.faults --output docs/results/faults.md`. Jobs of four ranks by `booster run`;
a fault strikes in `execute_pipeline`, `optimizer.step`, `save_checkpoint`, the data loader and `boost`, on every rank
in turn, under tp 2 x dp 2 and tp 2 x pp 2. Promised: named within {named:g} s in one line, and all processes gone
{gone:g} s later. torch {torch}, {cores} cores, {at_once} job(s) at once.

{table}
One line of each:

{examples}
"""
OPERATIONS = {
    "boost": "booster.boost",
    "execute_pipeline": "booster.execute_pipeline",
    "step": "optimizer.step",
    "save": "booster.save_checkpoint",
    "loader": "booster.execute_pipeline",  # which takes the batch
}


@dataclass(frozen=True)
class Trial:
    """One job.

    Attributes:
        fault, place: what happens, and where.
        rank: on which rank.
        layout: options of the plugin.
    """

    fault: str
    place: str
    rank: int
    layout: dict[str, int]

    def run(self) -> Outcome:
        return WatchedJob(self.fault, self.place, str(self.rank), json.dumps(self.layout)).outcome()

    def rank_is_named(self, outcome: Outcome) -> bool:
        """Whether the first line is about the right rank."""
        said = outcome.lines[0] if outcome.lines else ""
        return said.startswith((f"error: rank {self.rank} ", f"error on rank {self.rank} "))

    def operation_is_named(self, outcome: Outcome) -> bool:
        """Whether the first line says in which operation it happened."""
        said = outcome.lines[0] if outcome.lines else ""
        return OPERATIONS[self.place] in said and (self.fault != "raising" or "IndexError" in said)

    def passes(self, outcome: Outcome) -> bool:
        """Whether everything is as promised."""
        return (
            self.rank_is_named(outcome)
            and self.operation_is_named(outcome)
            and outcome.named_s <= NAMED_WITHIN_S
            and outcome.gone_s <= GONE_WITHIN_S
            and outcome.code not in (0, None)
            and len(outcome.lines) == 1
        )


def trials(fault: str, repetitions: int) -> list[Trial]:
    """Every place as often, and the ranks and layouts in turn."""
    return [
        Trial(fault, PLACES[n % len(PLACES)], n % 4, LAYOUTS[n // len(PLACES) % len(LAYOUTS)])
        for n in range(repetitions)
    ]


def row(fault: str, done: Iterable[tuple[Trial, Outcome]]) -> list[object]:
    """Of the table."""
    pairs = list(done)
    named = [outcome.named_s for _, outcome in pairs]
    gone = [outcome.gone_s for _, outcome in pairs]
    return [
        fault,
        len(pairs),
        sum(trial.rank_is_named(outcome) for trial, outcome in pairs),
        sum(trial.operation_is_named(outcome) for trial, outcome in pairs),
        f"{statistics.median(named):.2f} / {max(named):.2f}",
        f"{statistics.median(gone):.2f} / {max(gone):.2f}",
        sum(outcome.code not in (0, None) for _, outcome in pairs),
        sum(trial.passes(outcome) for trial, outcome in pairs),
    ]


def run_all(faults: Iterable[str], repetitions: int, at_once: int) -> dict[str, list[tuple[Trial, Outcome]]]:
    """Fault -> its trials and what came of them; what does not pass is shown as it happens."""
    done: dict[str, list[tuple[Trial, Outcome]]] = {fault: [] for fault in faults}
    everything = [
        trial for group in zip(*(trials(fault, repetitions) for fault in done), strict=True) for trial in group
    ]

    def run(trial: Trial) -> None:
        outcome = trial.run()
        done[trial.fault].append((trial, outcome))
        verdict = "passes" if trial.passes(outcome) else f"FAILS {outcome}"
        print(f"{trial}: {outcome.named_s:.2f} s, {outcome.gone_s:.2f} s: {outcome.lines[:1]} {verdict}", flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, everything))
    return done


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m zoo_tests.campaigns.faults", description="See how failures end.")
    parser.add_argument("--repetitions", type=int, default=20, help="of each fault")
    parser.add_argument("--only", choices=FAULTS, action="append", help="one of the faults; may be repeated")
    parser.add_argument("--at-once", type=int, default=1, help="jobs that run at the same time")
    parser.add_argument("--output", type=Path, help="write the table to this Markdown file")
    parser.add_argument("--cluster", action="store_true", help="faults of the network between two machines instead")
    parser.add_argument("--healthy", action="store_true", help="count false alarms in healthy jobs instead")
    parser.add_argument("--steps", type=int, default=10_000, help="of each healthy job")
    options = parser.parse_args()
    if options.healthy:
        _write(false_alarms.report(options.steps, options.at_once), options.output)
        return
    if options.cluster:
        _write(links.report(options.repetitions), options.output)
        return
    done = run_all(options.only or FAULTS, options.repetitions, options.at_once)
    columns = ["Fault", "Jobs", "Rank named", "Operation named", "Seconds until named (median / max)",
               "Seconds until all are gone (median / max)", "Exit code not 0", "All as promised"]  # fmt: skip
    rows = [row(fault, pairs) for fault, pairs in done.items()]
    examples = "\n".join(f"- {fault}: `{pairs[0][1].lines[0]}`" for fault, pairs in done.items() if pairs[0][1].lines)
    text = _PAGE.format(
        named=NAMED_WITHIN_S,
        gone=GONE_WITHIN_S,
        torch=torch.__version__,
        cores=os.cpu_count(),
        at_once=options.at_once,
        table=table("What happened", columns, rows),
        examples=examples,
    )
    _write(text, options.output)


def _write(text: str, output: Path | None) -> None:
    print(text)
    if output is not None:
        output.write_text(text)
