"""Layouts on two machines by the speed of the network between them: predicted and measured; and reductions.

The machines are namespaces of this one, see `zoo_tests/cluster`. One job of two ranks on each measures everything.
"""

from __future__ import annotations

import pickle
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import ratio, table
from benchmarks.links_model import LENGTH, ROWS, build, layouts
from plugins.hybrid_parallel.planner.calibrate import slowest
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.predict import Predictor
from plugins.hybrid_parallel.planner.profile import Profiler
from plugins.hybrid_parallel.planner.stage_map import ModelMap
from zoo_tests.cluster.cluster import Cluster
from zoo_tests.cluster.namespaces import Process, problem

# Name -> rate of the link of each machine; None for as much as this machine moves.
_RATES = {"100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit", "no limit": None}
_JOB = Path(__file__).with_name("links_job.py")
_LIMIT_S = 1500.0
_FLAT, _HIERARCHICAL = "every rank to every rank", "inside, then across"


def report(quick: bool) -> str:
    """Return the section of the results page; one sentence where machines cannot be made of namespaces."""
    if problem() is not None:
        return f"## Layouts on two machines\n\nNot measured: {problem()}.\n"
    found = _run(quick)
    return "\n".join([*(_layouts_table(found, name) for name in _RATES), _reductions_table(found)])


def _run(quick: bool) -> list[dict[str, Any]]:
    """Return what each rank has measured."""
    with tempfile.TemporaryDirectory() as folder, Cluster(2, shared=Path(folder)) as cluster:
        rates = [str(rate) for rate in _RATES.values()]
        jobs = cluster.start_job(2, str(_JOB), folder, "quick" if quick else "whole", *rates)
        for rate in _RATES.values():
            wants = Path(folder, f"wants-{rate}")
            assert jobs[0].wait_for(wants.exists, _LIMIT_S), _said(jobs)
            for machine in cluster.machines:
                machine.link.set(rate)
            Path(folder, f"has-{rate}").touch()
        assert [job.wait(_LIMIT_S) for job in jobs] == [0, 0], _said(jobs)
        return [pickle.loads(Path(folder, f"rank-{rank}.pickle").read_bytes()) for rank in range(4)]


def _said(jobs: list[Process]) -> str:
    return "\n".join(job.err[-3000:] for job in jobs)


def _layouts_table(found: list[dict[str, Any]], name: str) -> str:
    rate = str(_RATES[name])
    guesses = predictions(found, rate)
    times = {layout: max(each["steps"][rate][layout] for each in found) for layout in layouts()}
    rows = []
    for layout in layouts():
        places = [sorted(each, key=each.__getitem__).index(layout) + 1 for each in (guesses, times)]
        rows.append([layout, f"{guesses[layout] * 1e3:.0f}", f"{times[layout] * 1e3:.0f}",
                     f"{guesses[layout] / times[layout]:.2f}", *places])  # fmt: skip
    best = sorted(times, key=times.__getitem__).index(min(guesses, key=guesses.__getitem__)) + 1
    _, between = found[0]["links"][rate]
    note = (
        f"Measured between the machines, by both ranks of each at once: {between.bandwidth * 8e-9:.2f} Gbit/s a rank, "
        f"{between.latency * 1e6:.0f} us. The layout predicted to be the fastest is number {best} of those measured."
    )
    columns = ["Layout", "Predicted ms", "Measured ms", "Predicted / measured", "Place predicted", "Place measured"]
    return table(f"Two machines of two ranks, {name}", columns, rows, note)


def predictions(found: list[dict[str, Any]], rate: str) -> dict[Layout, float]:
    """Return the predicted seconds of a step of each layout, from the ranks' measurements at a rate."""
    calibration = slowest([each["compute"] for each in found])
    inside, between = found[0]["links"][rate]
    device = replace(calibration.device, inside=inside, between=between)
    predictor = Predictor(ModelMap(build), Profiler(build, LENGTH, device, "fp32", ROWS, calibration.parts))
    return {layout: predictor.predict(layout).seconds.total for layout in layouts()}


def _reductions_table(found: list[dict[str, Any]]) -> str:
    rows = []
    for name, rate in _RATES.items():
        times: Mapping[str, list[float]] = found[0]["reductions"][str(rate)]
        medians = [f"{statistics.median(times[way]) * 1e3:.0f}" for way in (_FLAT, _HIERARCHICAL)]
        rows.append([name, *medians, f"{ratio(times, _HIERARCHICAL, _FLAT):.2f}"])
    columns = ["Network", f"{_FLAT}, ms", f"{_HIERARCHICAL}, ms", "Times as fast"]
    return table("Reduce-scatter and all-gather of 4 MiB over two machines of two ranks", columns, rows,
                 "Ways alternate; medians of the turns.")  # fmt: skip
