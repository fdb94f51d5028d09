"""How often healthy jobs are accused: `--healthy` of the campaign. The jobs are those of `healthy.py`."""

from __future__ import annotations

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.harness import table
from zoo_tests.campaigns.faults.healthy import KINDS
from zoo_tests.campaigns.faults.watch import WatchedJob

_SCRIPT = Path(__file__).with_name("healthy.py")
_LAUNCHER = ("-m", "booster", "run", "--nproc-per-node", "2")
_ELASTIC = (*_LAUNCHER, "--elastic", "--min-ranks", "2", "--max-ranks", "2")  # without it, nothing takes snapshots
_LAYOUTS = ({"tp_size": 2}, {"pp_size": 2, "num_microbatches": 2}, {"dp_size": 2})
_LIMIT_S = 4 * 3600.0
_PAGE = """# False alarms

Written by `python -m zoo_tests.campaigns.faults --healthy --steps {steps} --output docs/results/false_alarms.md`. Jobs
of two ranks by `booster run` in which nothing fails, beside work that the failure monitor must not take for a fault.
Collectives of other threads begin up to 5 s late at random, and so do steps of each rank. Ranks compare their counts of
collectives five times a second (users: once in 2 s). torch {torch}, {cores} cores with other work on them: load
average up to {load:.0f}. {at_once} job(s) at once.

{table}
{alarms}
"""


def trial(kind: str, layout: dict[str, int], steps: int) -> tuple[list[object], tuple[str, ...], float]:
    """Run one job; return its row of the table, what was said of failures, and the load average at its end."""
    launcher = _ELASTIC if kind in ("snapshots", "everything") else _LAUNCHER
    began = time.monotonic()
    job = WatchedJob(kind, str(steps), json.dumps(layout), script=_SCRIPT, launcher=launcher)
    outcome = job.outcome_of_good_end(_LIMIT_S)
    compared = sum(map(int, re.findall(r"ends well after \d+ s and (\d+) comparisons", outcome.out)))
    ended_well = outcome.code == 0 and outcome.out.count("ends well") == 2
    alarms = outcome.lines if outcome.lines or ended_well else (f"error: exit code {outcome.code}",)
    minutes = (time.monotonic() - began) / 60
    name = ", ".join(f"{key}={value}" for key, value in layout.items())
    return [kind, name, steps, f"{minutes:.1f}", compared, len(alarms)], alarms, os.getloadavg()[1]


def report(steps: int, at_once: int) -> str:
    """Run every kind under one of the layouts; return the results page."""
    trials = [(kind, _LAYOUTS[number % len(_LAYOUTS)]) for number, kind in enumerate(KINDS)]

    def run(kind: str, layout: dict[str, int]) -> tuple[list[object], tuple[str, ...], float]:
        done = trial(kind, layout, steps)
        print(*done, flush=True)
        return done

    with ThreadPoolExecutor(at_once) as pool:
        rows, alarms, loads = zip(*pool.map(run, *zip(*trials, strict=True)), strict=True)
    columns = ["Beside training", "Layout", "Steps", "Minutes", "Comparisons", "False alarms"]
    return _PAGE.format(
        steps=steps,
        torch=torch.__version__,
        cores=os.cpu_count(),
        load=max(loads),
        at_once=at_once,
        table=table("Healthy jobs", columns, rows),
        alarms="\n".join(f"- `{line}`" for lines in alarms for line in lines),
    )
