"""Print a plan as text, export it as JSON, and plot it; its goodput, in closed form, and how often to save.

Goodput is how much of a long run is training when machines fail. `benchmarks/failure_simulation.py` simulates such
runs; the tests compare the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, exp, expm1, lgamma, log, log1p, sqrt
from pathlib import Path
from typing import Any

from plugins.hybrid_parallel.planner.costs import MEMORY_PARTS, SECONDS_PARTS, Prediction
from plugins.hybrid_parallel.planner.device import Device
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.plan import Plan, Rejection
from plugins.hybrid_parallel.shard_report import in_bytes

_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "gathered": "parameters of single layers",
    "temporary": "temporary buffers of a pass",
}
_REMEDIES = {
    **dict.fromkeys(("parameters", "gradients", "optimizer", "gathered"), "--offload"),
    **dict.fromkeys(("activations", "temporary"), "a smaller --sequence-length"),
}
_COLORS = ("#4c78a8", "#72b7b2", "#54a24b", "#f58518", "#e45756", "#bab0ac", "#b279a2")


def to_text(plan: Plan, device: Device, tokens: float, top: int) -> str:
    """Format the best `top` layouts as a table, and why others were rejected; `tokens`: tokens of a step."""
    if not plan.ranked:
        return _reasons(plan.rejected)
    header = ("", "layout", "memory", "step", "tokens/s", "MFU", "comm", "bubble")
    rows = [header, *(_row(number, each, device, tokens) for number, each in enumerate(plan.ranked[:top], 1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    more = f"{len(plan.ranked)} layouts fit, {len(plan.rejected)} do not"
    return "\n".join([*lines, "", more, "", _reasons(plan.rejected)]).rstrip()


def shortage(plan: Plan, device: Device) -> str:
    """Say in one sentence that no layout fits: which one is nearest, what it lacks, and which part is the largest."""
    nearest = plan.nearest
    if nearest is None:
        return f"no layout of {device.name} suits this model: {_reasons(plan.rejected).splitlines()[0]}"
    memory = nearest.memory
    largest = max(memory.parts, key=memory.parts.__getitem__)
    missing = in_bytes(memory.needed - device.memory)
    return (
        f"no layout fits the {in_bytes(device.memory)} of a device: the nearest, {nearest.layout}, needs "
        f"{in_bytes(memory.needed)}, {missing} more, and {in_bytes(memory.parts[largest])} of it are "
        f"{_PARTS[largest]}; use {_REMEDIES[largest]}, more --devices, or more --memory"
    )


def to_json(plan: Plan, device: Device, tokens: float) -> dict[str, Any]:
    """Convert a plan to JSON, with an entry for every ranked and every rejected layout."""
    return {
        "device": asdict(device),
        "layouts": [
            {
                "layout": str(each.layout),
                "options": each.layout.description(),
                "memory_bytes": {**asdict(each.memory), "total": each.memory.total, "needed": each.memory.needed},
                "fullest_stage": each.rank,
                "seconds": {**asdict(each.seconds), "total": each.seconds.total},
                "tokens_per_second": tokens / each.seconds.total,
                "model_flops_utilization": utilization(each, device),
            }
            for each in plan.ranked
        ],
        "rejected": [asdict(each) for each in plan.rejected],
    }


def utilization(prediction: Prediction, device: Device) -> float:
    """Return the model FLOPs utilization (MFU): model FLOP/s divided by the peak FLOP/s of all devices.

    Model FLOPs are the matrix products and the attention of three forward passes, without recomputation; a causal
    mask halves those of attention.
    """
    promised = device.peak(prediction.layout.precision) * prediction.layout.world_size
    return prediction.model_flops / prediction.seconds.total / promised


def draw(plan: Plan, device: Device, path: str | Path, title: str, top: int) -> None:
    """Plot the memory (with the limit of the device) and the step time of the best `top` layouts as stacked bars."""
    from matplotlib.figure import Figure

    shown = plan.ranked[:top]
    figure = Figure(figsize=(13, 2.0 + 0.42 * len(shown)), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, sharey=True)
    names = [str(each.layout) for each in shown]
    _bars(left, names, MEMORY_PARTS, [asdict(each.memory) for each in shown], 2**30)
    left.axvline(device.memory / 2**30, color="black", linestyle="--", linewidth=1)
    left.set_xlabel("memory of the fullest rank, GiB")
    _bars(right, names, SECONDS_PARTS, [asdict(each.seconds) for each in shown], 1.0)
    right.set_xlabel("time of a step, s")
    left.invert_yaxis()
    figure.savefig(path, dpi=120)


def _bars(
    axes: Any, names: Sequence[str], keys: Sequence[str], values: Sequence[dict[str, float]], unit: float
) -> None:
    begin = [0.0] * len(names)
    for key, color in zip(keys, _COLORS, strict=False):
        lengths = [each[key] / unit for each in values]
        axes.barh(names, lengths, left=begin, color=color, label=key, height=0.7)
        begin = [start + length for start, length in zip(begin, lengths, strict=True)]
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize="small", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _row(number: int, each: Prediction, device: Device, tokens: float) -> tuple[str, ...]:
    seconds = each.seconds
    return (
        str(number),
        str(each.layout),
        in_bytes(each.memory.total),
        f"{seconds.total:.4g} s",
        f"{tokens / seconds.total:,.0f}",
        f"{100 * utilization(each, device):.1f} %",
        f"{100 * seconds.comm / seconds.total:.0f} %",
        f"{100 * seconds.bubble / seconds.total:.0f} %",
    )


def _reasons(rejected: Sequence[Rejection]) -> str:
    """Group the rejections by kind of reason; show the count and the layout closest to fitting of each group."""
    kinds: dict[str, list[Rejection]] = {}
    for each in rejected:
        kinds.setdefault(re.sub(r"\d[\d.,]*( [KMG]iB| B)?", "#", each.reason), []).append(each)
    lines = []
    for members in sorted(kinds.values(), key=len, reverse=True):
        nearest = min(members, key=lambda each: each.memory.needed if each.memory is not None else 0.0)
        count = "1 layout" if len(members) == 1 else f"{len(members)} layouts, as"
        lines.append(f"{count} {nearest.layout}: {nearest.reason}")
    return "\n".join(lines)


DAY, _HOUR = 86400.0, 3600.0
DETECT, REFORM = 10.0, 30.0  # seconds: until a failure is noticed; the processes that are left connect again


@dataclass(frozen=True)
class FailureAssumptions:
    """What the planner cannot know about failures."""

    device_hours: float  # mean hours between two failures of one device, or of what it needs
    storage: float  # bytes per second of the shared file system, for each device
    start: float  # seconds until processes have started, connected and warmed up
    repair_hours: float  # hours until a machine that failed can be used again


@dataclass(frozen=True)
class Goodput:
    """The share of time that is training whose result remains, at the speed of all machines; the interval of saves."""

    useful: float  # the share, from 0 to 1
    interval: float  # seconds of training between checkpoints


def goodputs(prediction: Prediction, device: Device, assumed: FailureAssumptions) -> dict[str, Goodput]:
    """Return the goodput of a planned layout: name of each way to go on after a failure -> goodput.

    Machines fail independently, with exponential times, and a failed device takes its whole machine.
    """
    machines, uptime = machines_of(prediction.layout, device, assumed)
    between, save = uptime / machines, save_seconds(prediction, assumed)
    copy, step = copy_seconds(prediction, device), prediction.seconds.total

    def with_copies(recovery: float, speed: float) -> Goodput:
        # The disk is read only if the neighbour, which has the copy, fails during the recovery.
        interval = min(best_interval(save, between * uptime / (DETECT + recovery + copy)), DAY)
        unhindered = interval / (interval + save) * step / (step + copy) * speed
        # A failure undoes half a step in the mean; one during the recovery begins it again.
        remains = max(1 - step / 2 / between, 0.0) * exp(-(DETECT + recovery + copy) / between)
        return Goodput(unhindered * remains, interval)

    interval = min(best_interval(save, between), DAY)
    # Daly (2006), equation 13, for the mean time of a cycle: exp(recovery / M) * M * (exp(cycle / M) - 1).
    cycle, recovery = (interval + save) / between, (DETECT + assumed.start + save) / between
    return {
        "restart from disk": Goodput(interval / between * exp(-recovery - cycle) / -expm1(-cycle), interval),
        "copies on neighbours, spare machines": with_copies(assumed.start, 1.0),
        # The machines connect again twice: without the one that failed, and when it is back.
        "copies on neighbours, fewer replicas": with_copies(
            2 * REFORM, _mean_speed(prediction.layout, device, machines, assumed.repair_hours * _HOUR, uptime)
        ),
    }


def best_interval(save: float, between: float) -> float:
    """Return the seconds between saves that lose least (Daly, 2006, eq. 37); `save`, `between` failures: seconds."""
    if save >= 2 * between:
        return between
    ratio = save / (2 * between)
    return sqrt(2 * save * between) * (1 + sqrt(ratio) / 3 + ratio / 9) - save


def machines_of(layout: Layout, device: Device, assumed: FailureAssumptions) -> tuple[int, float]:
    """Return the number of machines of a layout, and the mean seconds between two failures of one machine."""
    node_size = min(device.node_size, layout.world_size)
    return layout.world_size // node_size, assumed.device_hours * _HOUR / node_size


def state_bytes(prediction: Prediction) -> float:
    """Return the bytes of a checkpoint, if all stages were as large as the fullest one."""
    layout, memory = prediction.layout, prediction.memory
    copies = layout.num_shards if layout.zero_stage == 3 else 1
    offloaded = memory.host if layout.offloads else 0.0
    states = memory.parameters * copies + (memory.optimizer + offloaded) * layout.num_shards
    return layout.tp_size * layout.pp_size * states


def save_seconds(prediction: Prediction, assumed: FailureAssumptions) -> float:
    """Return the seconds to write a checkpoint, or to read it."""
    return state_bytes(prediction) / (assumed.storage * prediction.layout.world_size)


def copy_seconds(prediction: Prediction, device: Device) -> float:
    """Return the seconds in which a rank sends its optimizer states to a neighbour, or reads them back."""
    return (prediction.memory.optimizer + prediction.memory.host) / device.between.bandwidth


def speed_of(layout: Layout, device: Device) -> Callable[[int], float]:
    """Return machines that work -> speed; replicas that are left run more micro-batches of the global batch."""
    node_size = min(device.node_size, layout.world_size)
    of_replica = layout.world_size // layout.dp_size
    total, ramp = layout.num_microbatches * layout.dp_size, layout.pp_size - 1

    def speed(working: int) -> float:
        replicas = min(working * node_size // of_replica, layout.dp_size)
        return (layout.num_microbatches + ramp) / (ceil(total / replicas) + ramp) if replicas else 0.0

    return speed


def _mean_speed(layout: Layout, device: Device, machines: int, repair: float, uptime: float) -> float:
    """Return the mean of `speed_of` if each machine is repaired for a share of its time."""
    speed, away = speed_of(layout, device), repair / (repair + uptime)

    def chance(out: int) -> float:  # of the binomial distribution
        ways = lgamma(machines + 1) - lgamma(out + 1) - lgamma(machines - out + 1)
        return exp(ways + out * log(away) + (machines - out) * log1p(-away))

    return sum(chance(out) * speed(machines - out) for out in range(machines + 1))


def goodput_text(results: Mapping[str, Goodput], machines: int, between: float) -> str:
    """Format the goodput of each way as a table; `between` is the mean of seconds between failures."""
    rows = [("with failures", "goodput", "checkpoint every")]
    rows += [(name, f"{100 * each.useful:.1f} %", duration(each.interval)) for name, each in results.items()]
    lines = [f"{name:<38}{useful:<9}{interval}" for name, useful, interval in rows]
    plural = "s" if machines > 1 else ""
    return "\n".join([f"a failure every {duration(between)} on {machines} machine{plural}", "", *lines])


def duration(seconds: float) -> str:
    """Format a time in its largest unit."""
    for unit, size in (("d", DAY), ("h", _HOUR), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
