"""Print a plan as text, export it as JSON, and plot it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plugins.hybrid_parallel.inspect.shard_report import in_bytes
from plugins.hybrid_parallel.planner.costs import MEMORY_PARTS, SECONDS_PARTS, Prediction
from plugins.hybrid_parallel.planner.device import Device
from plugins.hybrid_parallel.planner.search import Plan, Rejection

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
    """Format the best `top` layouts as a table, followed by the reasons why others were rejected.

    Args:
        tokens: tokens of a step.
    """
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
    promised = device.flops[prediction.layout.precision] * prediction.layout.world_size
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
