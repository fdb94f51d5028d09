"""Command-line options that describe a layout: their checks, and their conversion to options of the plugin."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options for the sizes of the mesh."""
    parser.add_argument("--tp", type=count, default=1, help="tensor-parallel ranks (1)")
    parser.add_argument("--pp", type=count, default=1, help="ranks of the pipeline (1)")
    parser.add_argument("--dp", type=count, help="data-parallel ranks")


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the options for the mesh sizes and for expert, sequence and pipeline parallelism."""
    add_sizes(parser)
    parser.add_argument("--ep", type=count, default=1, help="of the data-parallel ranks, those that share experts (1)")
    parser.add_argument("--cp", type=count, default=1, help="ranks that share each sequence, as by ring attention (1)")
    parser.add_argument(
        "--sp",
        nargs="?",
        const="split_gather",
        choices=["split_gather", "all_to_all"],
        help="cut activations along the sequence (split_gather), or let the --cp ranks exchange heads (all_to_all)",
    )
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b", help="of the pipeline (1f1b)")
    parser.add_argument("--chunks", type=count, help="stages a rank holds, where the schedule lets one choose (2)")
    parser.add_argument("--microbatches", type=count, help="micro-batches of a step (one a pipeline stage)")


def layout_options(options: argparse.Namespace) -> dict[str, Any]:
    """Convert parsed arguments to options of `HybridParallelPlugin`."""
    chosen: dict[str, Any] = {
        "tp_size": options.tp,
        "pp_size": options.pp,
        "dp_size": options.dp or options.ep,
        "ep_size": options.ep,
        "pp_style": options.schedule,
        "num_model_chunks": options.chunks,
        "num_microbatches": options.microbatches,
    }
    if options.cp > 1:
        chosen["cp_size"] = options.cp
    if options.sp is not None:
        exchanges = options.cp > 1 and options.sp == "all_to_all"
        chosen |= {"enable_sequence_parallelism": not exchanges, "sequence_parallelism_mode": options.sp}
    return chosen


def count(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive integer, such as 4")
    return int(text)


def given(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """Return the names of the options that differ from their defaults."""
    return [name for name, value in vars(options).items() if value != parser.get_default(name)]


def refuse_unused(found: Collection[str], used: Collection[str], what: str) -> None:
    """Refuse an option that has no effect on the requested output.

    Args:
        found: names of the options that were given.
        used: names of the options that have an effect.
        what: the requested output, such as "a model".
    """
    unused = next((name for name in found if name not in used), None)
    if unused is not None:
        allowed = ", ".join(_spelled(name) for name in used)
        raise ConfigurationError(f"{_spelled(unused)} has no effect on {what}; what is used there: {allowed}")


def refuse_bad_places(*paths: Path | None) -> None:
    """Refuse output files that cannot be written, before the work starts."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ConfigurationError(f"{path} cannot be written, {path.parent} is no directory; use one that exists")
        if path is not None and path.is_dir():
            raise ConfigurationError(f"{path} cannot be written, it is a directory; give the name of a file")


def refuse_without_pipeline(ranks: int, schedule: str | None, chunks: int | None) -> None:
    """Refuse pipeline options if the pipeline has only one rank."""
    if ranks == 1 and (schedule not in (None, "1f1b") or chunks is not None):
        option = f"--schedule {schedule}" if schedule not in (None, "1f1b") else f"--chunks {chunks}"
        raise ConfigurationError(f"{option} has no effect without a pipeline; add --pp 2, or more")


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")
