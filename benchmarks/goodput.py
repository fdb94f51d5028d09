"""Goodput of Llama 3 405B under the published rate of failures, for each way to recover, by number of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from benchmarks.failure_simulation import RECOVERIES, Goodput, costs_of, failures_of, goodput, goodputs
from benchmarks.published_runs import fused_device, llama_runs
from plugins.hybrid_parallel.planner.costs import Prediction
from plugins.hybrid_parallel.planner.predict import Predictor
from plugins.hybrid_parallel.planner.profile import Profiler
from plugins.hybrid_parallel.planner.report import (
    FailureAssumptions,
    best_interval,
    duration,
    speed_of,
    state_bytes,
)
from plugins.hybrid_parallel.planner.stage_map import ModelMap

# arXiv 2407.21783, section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 devices, over 90 % of the time
# effective. Section 3.3.1: its file system sustains 2 TB/s.
_DEVICES, _INTERRUPTIONS, _DAYS, _STORAGE, _PUBLISHED = 16384, 419, 54, 2e12, "more than 90 %"
ASSUMED = FailureAssumptions(
    device_hours=_DEVICES * _DAYS * 24 / _INTERRUPTIONS, storage=_STORAGE / _DEVICES, start=300.0, repair_hours=4.0
)


def report(quick: bool) -> str:
    """Return the section of the results page."""
    planned, device = _planned(), fused_device("H100")
    costs, failures = costs_of(planned, device, ASSUMED), failures_of(planned.layout, device, ASSUMED)
    rows = [
        f"| {devices:,} | {name} | {100 * each.useful:.1f} % | {100 * each.saving:.1f} % | {100 * each.lost:.1f} % | "
        f"{100 * each.recovering:.1f} % | {100 * each.fewer:.1f} % | {duration(each.interval)} |"
        for devices in ((16384,) if quick else (4096, 16384, 65536))
        for name, each in by_devices(devices).items()
    ]
    best = best_interval(costs.save, failures.between)
    speed = speed_of(planned.layout, device)
    others = {
        factor: goodput(RECOVERIES[0], costs, failures, speed, interval=factor * best)
        for factor in (0.25, 0.5, 1, 2, 4)
    }
    sweep = ", ".join(f"{factor:g} of it: {100 * each.useful:.2f} %" for factor, each in others.items())
    return "\n".join(
        [
            "## Goodput under failures",
            "",
            f"Llama 3 405B as published (`{planned.layout}` on {_DEVICES:,} H100), a failure every "
            f"{failures.between / 3600:.1f} h: {_INTERRUPTIONS} in {_DAYS} days (arXiv 2407.21783, section 3.3.4, "
            f"which states {_PUBLISHED} of effective training time). Other numbers of devices change the number of "
            "replicas, with as many samples for each. Planned: "
            f"{costs.step:.1f} s a step, {state_bytes(planned) / 1e12:.1f} TB of state, {costs.save:.1f} s to save or "
            f"to read it at {_STORAGE / 1e12:g} TB/s, {1000 * costs.copy:.0f} ms a step to send states to a neighbour. "
            f"Assumed: {costs.detect:.0f} s to notice, {costs.start:.0f} s to start processes on a spare machine, "
            f"{costs.reform:.0f} s to connect those that are left, {ASSUMED.repair_hours:g} h to repair a machine. "
            "Mean of 20 simulated runs of 54 days.",
            "",
            "| Devices | After a failure | Goodput | Saving | Lost | Recovering | Fewer replicas | Checkpoint every |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"Daly's interval is {best:.0f} s. Restart from disk with other intervals, {sweep}.",
            "",
        ]
    )


def by_devices(devices: int) -> Mapping[str, Goodput]:
    """Return name of each way to recover -> shares of time on as many devices."""
    planned = _planned()
    layout = replace(planned.layout, dp_size=planned.layout.dp_size * devices // _DEVICES)
    shards = planned.layout.num_shards / layout.num_shards
    memory = replace(planned.memory, optimizer=planned.memory.optimizer * shards)
    return goodputs(replace(planned, layout=layout, memory=memory), fused_device("H100"), ASSUMED)


@cache
def _planned() -> Prediction:
    run = next(each for each in llama_runs() if f"{_DEVICES}" in each.name)
    predictor = Predictor(ModelMap(run.build), Profiler(run.build, run.length, fused_device(run.device), "bf16"))
    return min((predictor.predict(layout) for layout in run.layouts), key=lambda each: each.seconds.total)
