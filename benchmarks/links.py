"""Layouts on two machines by the speed of the network between them: predicted and measured; and reductions.

The machines are namespaces of this one, see `zoo_tests/cluster`. Of two jobs, with one and with two ranks on each, the
latter measures the reductions too. Where this machine has two cores, only the ranks of the former have one each.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import ratio, table
from benchmarks.links_model import layouts as layouts_of

# Name -> rate of the link of each machine.
_RATES = {"100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit", "10 Gbit/s": "10gbit"}
_ON_MACHINES = "zoo_tests.cluster.run_at_rates"
_JOB = Path(__file__).with_name("links_job.py")
_FLAT, _HIERARCHICAL = "every rank to every rank", "inside, then across"


def report(quick: bool) -> str:
    """Return the section of the results page; one sentence where machines cannot be made of namespaces."""
    sections = []
    for here in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            mode = "quick" if quick else "whole"
            command = [sys.executable, "-m", _ON_MACHINES, str(here), folder, str(_JOB), mode, *_RATES.values()]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                return f"## Layouts on two machines\n\nNot measured: {done.stderr.strip()}\n"
            found = [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(2 * here)]
        sections += [_layouts_table(found, name) for name in _RATES]
    return "\n".join([*sections, _reductions_table(found)])


def _layouts_table(found: list[dict[str, Any]], name: str) -> str:
    rate, layouts = _RATES[name], layouts_of(len(found))
    ranks = "one rank" if len(found) == 2 else "two ranks"
    # The slowest rank decides.
    guesses, times = (
        {layout: max(each[what][rate][index] for each in found) for index, layout in enumerate(layouts)}
        for what in ("predicted", "steps")
    )
    rows = []
    for layout in layouts:
        places = [sorted(each, key=each.__getitem__).index(layout) + 1 for each in (guesses, times)]
        rows.append([layout, f"{guesses[layout] * 1e3:.0f}", f"{times[layout] * 1e3:.0f}",
                     f"{guesses[layout] / times[layout]:.2f}", *places])  # fmt: skip
    best = sorted(times, key=times.__getitem__).index(min(guesses, key=guesses.__getitem__)) + 1
    between = found[0]["network"][rate]
    note = (
        f"Measured between the machines, by all ranks of each at once: {between['bandwidth'] * 8e-9:.2f} Gbit/s a "
        f"rank, {between['latency'] * 1e6:.0f} us. The layout predicted to be the fastest is number {best} of those "
        "measured."
    )
    columns = ["Layout", "Predicted ms", "Measured ms", "Predicted / measured", "Place predicted", "Place measured"]
    return table(f"Two machines of {ranks}, {name}", columns, rows, note)


def _reductions_table(found: list[dict[str, Any]]) -> str:
    rows = []
    for name, rate in _RATES.items():
        times: Mapping[str, list[float]] = found[0]["reductions"][rate]
        medians = [f"{statistics.median(times[way]) * 1e3:.0f}" for way in (_FLAT, _HIERARCHICAL)]
        rows.append([name, *medians, f"{ratio(times, _HIERARCHICAL, _FLAT):.2f}"])
    columns = ["Network", f"{_FLAT}, ms", f"{_HIERARCHICAL}, ms", "Times as fast"]
    return table("Reduce-scatter and all-gather of 4 MiB over two machines of two ranks", columns, rows,
                 "Ways alternate; medians of the turns.")  # fmt: skip
