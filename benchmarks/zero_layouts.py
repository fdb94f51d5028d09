"""ZeRO stages 2 and 3 with two tensor-parallel ranks or two stages, and the bytes that ranks receive in a step.

Times and peaks are measured as in `zero_stages`. Bytes are counted where ranks of one machine read each other's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

from benchmarks.harness import run_ranks, table
from benchmarks.zero_stages import COLUMNS, compared, model_and_batch, note, sizes
from benchmarks.zero_systems import STAGES
from plugins.hybrid_parallel.zero.collectives import shared_memory

PAIRS = (
    ("ours, tp2, stage 2", "FSDP2 + DTensor tp2, reshard_after_forward=False"),
    ("ours, tp2, stage 3", "FSDP2 + DTensor tp2"),
    ("ours, pp2, stage 3", "ours, pp2, stage 2"),
)
# Passes of the whole parameters or gradients between ranks, in a step (arXiv 1910.02054, section 7).
VOLUMES = {1: 2, 2: 2, 3: 3}


def received(name: str, layers: int) -> float:
    """Return what this rank reads of other ranks' memory in a step, in sizes of the model."""
    import torch.distributed as dist

    whole, batch = model_and_batch("Llama", layers, dist.get_world_size(), dist.get_rank())
    size = sum(param.numel() * param.element_size() for param in whole.parameters())
    step, count, windows = STAGES[name](whole), 0, shared_memory._windows

    def counted(*arguments: Any) -> Iterator[Any]:
        nonlocal count
        for part, window in windows(*arguments):
            count += window.numel() * window.element_size()
            yield part, window

    step(batch)
    with mock.patch.object(shared_memory, "_windows", counted):
        step(batch)
    return count / size


def report(quick: bool) -> str:
    layers, _ = sizes(quick)
    counts = [
        [ranks, stage, run_ranks(received, ranks, f"ours, stage {stage}", layers), volume * (ranks - 1) / ranks]
        for ranks in (2, 4)
        for stage, volume in VOLUMES.items()
    ]
    sections = [
        table(
            "ZeRO stages with tensor and pipeline parallelism",
            COLUMNS,
            list(compared("Llama", 4, 2, PAIRS, quick)),
            f"4 ranks, 4 micro-batches in a pipeline. {note(quick)} A stage that gathers its layers for every "
            "micro-batch gives time for memory.",
        ),
        table(
            "Bytes that a rank receives in a step of ZeRO, in sizes of the model",
            ["dp", "stage", "counted", "formula"],
            counts,
            "A Llama. The formula has a reduce-scatter and an all-gather for stages 1 and 2, and another all-gather "
            "for stage 3. Ours gathers an embedding once, since the gradient of a lookup does not read the table.",
        ),
    ]
    return "\n".join(sections)
