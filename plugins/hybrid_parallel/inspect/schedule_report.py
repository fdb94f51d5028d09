"""Reports of a pipeline timeline: text, JSON, and a trace for the viewers of Chrome and Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.pipeline.timeline import TimedAction, Timeline

_WIDEST = 240  # characters


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
    """Write the result of `to_trace` to a JSON file."""
    try:
        path.write_text(json.dumps(to_trace(timeline, unit_us)))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written ({error.strerror}); give another path") from error


def to_json(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline: its length, and each rank's actions with the share of time that it is idle."""
    ranks = zip(timeline.ranks, timeline.bubbles, timeline.peaks, strict=True)
    return {
        "length": timeline.length,
        "idle": sum(timeline.bubbles) / max(len(timeline.bubbles), 1),
        "ranks": [
            {
                "rank": rank,
                "idle": idle,
                "peak_activations": peak,
                "actions": [
                    {
                        "action": timed.action.kind.title,
                        "stage": timed.action.stage,
                        "microbatch": timed.action.microbatch,
                        "begin": timed.begin,
                        "end": timed.end,
                    }
                    for timed in actions
                ],
            }
            for rank, (actions, idle, peak) in enumerate(ranks)
        ],
    }


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
