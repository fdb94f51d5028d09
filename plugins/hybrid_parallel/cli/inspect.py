"""`booster inspect`: show which rank holds which parameters of a model, or a predicted or recorded schedule."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from booster.cli.command_parser import CommandParser, prints_json, write_json
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.cli.arguments import (
    count,
    given,
    model_builder,
    refuse_bad_places,
    refuse_unused,
    refuse_without_pipeline,
)
from plugins.hybrid_parallel.config.groups import PRECISIONS
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Kind
from plugins.hybrid_parallel.pipeline.timeline import TimedAction, Timeline, read_timelines, simulate
from plugins.hybrid_parallel.shard_report import shards_as_json

# Requested output -> options that have an effect on it.
_USED_FOR = {
    "a model": ("head", "tp", "pp", "schedule", "chunks", "precision", "check", "html", "json"),
    "a schedule": (
        *("schedule", "pp", "microbatches", "chunks", "forward", "backward", "weights", "send"),
        *("trace", "json"),
    ),
    "a recording": ("recorded", "step", "trace", "json"),
}


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    command = parser()
    options = command.parse_args(arguments)
    what = _asked_for(options)
    refuse_unused([name for name in given(command, options) if name != "model"], _USED_FOR[what], what)
    refuse_bad_places(options.json)
    if options.model is None and options.pp is None:
        options.pp = 4
    if options.model is not None:
        return _show_model(options)
    if options.recorded is not None:
        timeline, title, unit = _recorded(options), f"{options.recorded}, step {options.step}", "ms"
    else:
        timeline, title, unit = _predicted(options), _title(options), "time of a forward pass"
    if not prints_json(options.json):
        sys.stdout.write(f"{title}\n\n{timeline_text(timeline)}\n")
    if options.json is not None:
        write_json({"title": title, "unit": unit, **timeline_json(timeline)}, options.json)
    if options.trace is not None:
        write_trace(timeline, options.trace, unit_us=1e3)
    return 0


def _asked_for(options: argparse.Namespace) -> str:
    """Return what was requested, as a key of `_USED_FOR`."""
    if options.model is not None:
        return "a model"
    if options.recorded is not None:
        return "a recording"
    if options.schedule is None:
        raise ConfigurationError(
            "nothing was asked for; use a model's directory, --schedule 1f1b, or --recorded DIRECTORY"
        )
    return "a schedule"


def _show_model(options: argparse.Namespace) -> int:
    """Print which rank holds which parameters under a layout."""
    from plugins.hybrid_parallel.shard_report import shard_report, to_text, write_page

    refuse_without_pipeline(options.pp or 1, options.schedule, options.chunks)
    chosen = {"tp_size": options.tp, "pp_size": options.pp or 1, "num_model_chunks": options.chunks}
    config = HybridParallelConfig.from_options(
        **chosen, pp_style=options.schedule or "1f1b", precision=options.precision
    )
    tp_size, pp_size = config.parallel.tp_size, config.parallel.pp_size
    ranks = shard_report(model_builder(options.model, options.head), config, tp_size * pp_size)
    title = f"{options.model}, tp {tp_size} x pp {pp_size}, {options.precision}"
    if not prints_json(options.json):
        sys.stdout.write(f"{title}\n\n{to_text(ranks)}\n")
    if options.json is not None:
        layout = {"tp_size": tp_size, "pp_size": pp_size, "precision": options.precision}
        write_json({"model": options.model, **layout, "ranks": shards_as_json(ranks)}, options.json)
    if options.html is not None:
        write_page(ranks, title, options.html)
    if not options.check:
        return 0
    from plugins.hybrid_parallel.verify.layout_check import CheckedModel, check_layout

    with torch.device("meta"):
        model = model_builder(options.model, options.head)()
    report = check_layout(CheckedModel(model), chosen, options.tp * (options.pp or 1))
    sys.stdout.write("\n".join(["", *report.lines()]) + "\n")
    return int(bool(report.findings))


def _predicted(options: argparse.Namespace) -> Timeline:
    """Simulate the schedule; the given times are those of a rank, and its stages take equal shares of them."""
    config = HybridParallelConfig.from_options(
        pp_size=options.pp,
        pp_style=options.schedule,
        num_model_chunks=options.chunks,
        num_microbatches=options.microbatches,
    )
    schedule, chunks = config.schedule, config.chunks_per_rank
    durations = {
        Kind.FORWARD: options.forward,
        Kind.BACKWARD: options.backward + options.weights,
        Kind.BACKWARD_INPUT: options.backward,
        Kind.BACKWARD_WEIGHT: options.weights,
    }
    tables = [schedule.actions(rank, options.pp, options.microbatches, chunks) for rank in range(options.pp)]
    return simulate(tables, lambda action: durations[action.kind] / chunks, lambda source, target: options.send)


def _recorded(options: argparse.Namespace) -> Timeline:
    steps = read_timelines(options.recorded)
    if options.step is None:
        options.step = max(steps)
    if options.step not in steps:
        raise ConfigurationError(
            f"{options.recorded} has no step {options.step}; use one from {min(steps)} to {max(steps)}"
        )
    return steps[options.step]


def _title(options: argparse.Namespace) -> str:
    return f"{options.schedule}, {options.pp} ranks, {options.microbatches} micro-batches"


def parser() -> CommandParser:
    """Return the parser of the command line."""
    command = CommandParser(
        prog="booster inspect",
        description="Show who holds what of a model, or a pipeline schedule: who runs what when, and who is idle.",
        examples=(
            "booster inspect config.json --tp 2 --pp 2 --html shards.html",
            "booster inspect --schedule zbv --pp 4 --microbatches 8 --trace zbv.json",
            "booster inspect --schedule 1f1b --pp 4 --send 0.1 --json",
            "booster inspect --recorded times --trace trace.json",
        ),
    )
    command.add_argument(
        "model", nargs="?", help="a model's directory, its config.json, or a name that is in the cache"
    )
    command.add_argument("--head", help="the model's class, such as BertForMaskedLM")
    command.add_argument("--tp", type=count, default=1, help="tensor-parallel ranks of a model (1)")
    command.add_argument("--precision", choices=PRECISIONS, default="fp32", help="that a model is trained in (fp32)")
    command.add_argument("--schedule", choices=list(SCHEDULES), help="predict a step of this schedule")
    command.add_argument("--pp", type=count, help="ranks of the pipeline (1 for a model, 4 for a schedule)")
    command.add_argument("--microbatches", type=count, default=8, help="micro-batches of a step (8)")
    command.add_argument("--chunks", type=count, help="stages a rank holds, where the schedule lets one choose (2)")
    command.add_argument("--forward", type=_time, default=1.0, help="time of a rank's forward pass (1)")
    command.add_argument("--backward", type=_time, default=1.0, help="time of its gradients of activations (1)")
    command.add_argument("--weights", type=_time, default=1.0, help="time of its gradients of weights (1)")
    command.add_argument("--send", type=_time, default=0.0, help="time that a message travels (0)")
    command.add_argument(
        "--recorded", type=Path, help="show what HybridParallelPlugin(record_schedule=DIRECTORY) wrote"
    )
    command.add_argument("--step", type=int, help="of a recording; the last one by default")
    command.add_argument("--check", action="store_true", help="train a small copy of a model under the layout, too")
    command.add_argument("--html", type=Path, help="write a page of a model")
    command.add_argument("--trace", type=Path, help="write a trace for chrome://tracing or ui.perfetto.dev")
    command.add_json()
    return command


def _time(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is no time; use a number such as 0.5")
    return value


_WIDEST = 240  # characters


def timeline_text(timeline: Timeline) -> str:
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
    """Return trace events for `chrome://tracing` and ui.perfetto.dev; `unit_us`: microseconds per unit."""
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


def timeline_json(timeline: Timeline) -> dict[str, Any]:
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
