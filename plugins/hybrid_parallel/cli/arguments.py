"""Command-line options that describe a layout, and their conversion to options of the plugin."""

from __future__ import annotations

import argparse
from typing import Any

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
