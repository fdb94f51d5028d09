"""Plots of a pipeline timeline: text, PNG, and a trace for the viewers of Chrome and Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.pipeline.schedule import Kind
from plugins.hybrid_parallel.pipeline.simulate import TimedAction, Timeline

_COLORS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#f58518",
    Kind.BACKWARD_INPUT: "#eeca3b",
    Kind.BACKWARD_WEIGHT: "#54a24b",
}
_WIDEST = 240  # characters
_LABELLED = 400  # maximum number of actions to label; more labels would not be legible


def to_text(timeline: Timeline) -> str:
    """Format a timeline as text: one line per rank, proportional to time, and a table of idle shares.

    `F3` is a forward pass of micro-batch 3; the number of apostrophes after it is the index of the model chunk on the
    rank. Lines that would be too wide are left out.
    """
    rows = [_shares(timeline)]
    cells = list(_rows_of_cells(timeline))
    if max((len(row) for row in cells), default=0) <= _WIDEST:
        rows.insert(0, "\n".join(cells))
    return "\n\n".join(rows)


def to_trace(timeline: Timeline, unit_us: float = 1.0) -> dict[str, Any]:
    """Return trace events for `chrome://tracing` and ui.perfetto.dev.

    Args:
        timeline: timeline to convert.
        unit_us: microseconds per unit of the timeline.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        for rank in range(len(timeline.ranks))
    ]
    for rank, actions in enumerate(timeline.ranks):
        for timed in actions:
            action = timed.action
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "name": f"{action.kind.title} {action.microbatch}",
                    "cat": action.kind.title,
                    "ts": timed.begin * unit_us,
                    "dur": (timed.end - timed.begin) * unit_us,
                    "args": {"stage": action.stage, "microbatch": action.microbatch},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(timeline: Timeline, path: Path, unit_us: float = 1.0) -> None:
    """Write the result of `to_trace` to a JSON file.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(to_trace(timeline, unit_us)))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written ({error.strerror}); give another path") from error


def draw(timeline: Timeline, path: Path, title: str, unit: str = "time") -> None:
    """Draw one row of bars per rank; chunks alternate between full and reduced opacity.

    Raises:
        ConfigurationError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ConfigurationError("a picture needs matplotlib; pip install matplotlib") from None
    count = len(timeline.ranks)
    figure = Figure(figsize=(14, 1.2 + 0.5 * count), layout="constrained")
    axes = figure.subplots()
    labelled = sum(len(actions) for actions in timeline.ranks) <= _LABELLED
    for rank, actions in enumerate(timeline.ranks):
        for timed, chunk in _with_chunks(actions):
            action, length = timed.action, timed.end - timed.begin
            axes.barh(
                rank, length, left=timed.begin, height=0.86, color=_COLORS[action.kind],
                edgecolor="white", linewidth=0.6, alpha=1.0 if chunk % 2 == 0 else 0.6,
            )  # fmt: skip
            if labelled:
                axes.text(timed.begin + length / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=7)
    bubbles = timeline.bubbles
    axes.set_yticks(range(count), [f"rank {rank}  (idle {bubbles[rank]:.0%})" for rank in range(count)])
    axes.set(ylim=(count - 0.5, -0.5), xlim=(0, timeline.length), xlabel=unit, title=title)
    kinds = [kind for kind in Kind if any(each.action.kind is kind for rank in timeline.ranks for each in rank)]
    axes.legend(
        handles=[Patch(color=_COLORS[kind], label=kind.title) for kind in kinds],
        loc="upper center", bbox_to_anchor=(0.5, -0.14 - 0.3 / count), ncols=4, frameon=False,
    )  # fmt: skip
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be written ({error}); give a path that ends in .png") from error


def _shares(timeline: Timeline) -> str:
    lines = [
        f"rank {rank}: idle {bubble:6.1%}, at most {peak} activations of stages"
        for rank, (bubble, peak) in enumerate(zip(timeline.bubbles, timeline.peaks, strict=True))
    ]
    mean = sum(timeline.bubbles) / max(len(timeline.bubbles), 1)
    return "\n".join([*lines, f"all ranks: idle {mean:.1%} of {timeline.length:g}"])


def _rows_of_cells(timeline: Timeline) -> Iterator[str]:
    lengths = [timed.end - timed.begin for actions in timeline.ranks for timed in actions]
    slot = min((length for length in lengths if length > 0), default=1.0)
    labelled = [
        [
            (timed, f"{timed.action.kind.value}{timed.action.microbatch}{chr(39) * chunk}")
            for timed, chunk in _with_chunks(actions)
        ]
        for actions in timeline.ranks
    ]
    width = max((len(label) for actions in labelled for _, label in actions), default=1) + 1
    for rank, actions in enumerate(labelled):
        row = ""
        for timed, label in actions:
            row = row.ljust(round(timed.begin / slot * width)) + label
            row = row.ljust(round(timed.end / slot * width) - 1, "-") + " "
        yield f"{rank:>3} |{row}"


def _with_chunks(actions: Iterator[TimedAction] | list[TimedAction]) -> list[tuple[TimedAction, int]]:
    """Pair each action with the index of its model chunk on the rank."""
    actions = list(actions)
    stages = sorted({timed.action.stage for timed in actions})
    return [(timed, stages.index(timed.action.stage)) for timed in actions]
