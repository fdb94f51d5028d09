"""ZeRO stages 1 to 3 of this package against DDP, FSDP2 and DeepSpeed: time and peak memory of a training step.

BERT-base and a Llama of hidden size 768, AdamW, one thread per rank; data parallel, and with two tensor-parallel ranks
or two stages. In each run one of our stages and another system share the ranks and take turns; for memory each system
runs alone in new processes. Bytes that ranks read from each other are counted in a run of their own.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import ratio, run_ranks, table, turns
from benchmarks.zero_systems import COMBINED, STAGES, Batch, bert, device, is_installed, llama
from plugins.hybrid_parallel.zero.comm.collectives import SharedMemoryCollectives

# Our stage and what shards as much; DDP shards nothing.
PAIRS = (
    ("ours, stage 1", "DDP + fused AdamW"),
    ("ours, stage 2", "DDP + fused AdamW"),
    ("ours, stage 2", "FSDP2, reshard_after_forward=False"),
    ("ours, stage 2", "DeepSpeed ZeRO-2"),
    ("ours, stage 3", "FSDP2"),
    ("ours, stage 3", "DeepSpeed ZeRO-3"),
)
COMBINED_PAIRS = (
    ("ours, tp2, stage 2", "FSDP2 + DTensor tp2, reshard_after_forward=False"),
    ("ours, tp2, stage 3", "FSDP2 + DTensor tp2"),
    ("ours, pp2, stage 3", "ours, pp2, stage 2"),
)
_ROWS, _LENGTH = 8, 128  # of a global batch
_SYSTEMS = STAGES | COMBINED


def model_and_batch(name: str, layers: int, replicas: int) -> tuple[nn.Module, Batch]:
    """Create a model and this rank's share of a global batch."""
    generator = torch.Generator().manual_seed(dist.get_rank() * replicas // dist.get_world_size())
    rows = _ROWS // replicas
    ids = torch.randint(1, 30000, (rows, _LENGTH), generator=generator).to(device())
    if name == "Llama":
        return llama(layers), {"input_ids": ids, "labels": ids}
    return bert(layers), {"input_ids": ids, "labels": torch.randint(0, 2, (rows,), generator=generator).to(device())}


def speed(model: str, mine: str, other: str, layers: int, replicas: int, repeats: int) -> float:
    """Return the ratio of our speed to the other system's."""
    _, batch = model_and_batch(model, 1, replicas)
    steps = {name: _SYSTEMS[name](model_and_batch(model, layers, replicas)[0]) for name in (mine, other)}
    times = turns({name: lambda step=step: step(batch) for name, step in steps.items()}, repeats, warm_up=1)
    return ratio(times, mine, other)


def peak(model: str, name: str, layers: int, replicas: int) -> int:
    """Return the increase of peak memory in bytes since before the model was created, maximum over ranks."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    whole, batch = model_and_batch(model, layers, replicas)
    step = _SYSTEMS[name](whole)
    del whole
    for _ in range(3):
        step(batch)
    fullest = torch.tensor((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
    dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
    return int(fullest)


def bytes_moved(model: str, name: str, layers: int) -> float:
    """Return what a rank reads of other ranks' memory in a step, in sizes of the model."""
    whole, batch = model_and_batch(model, layers, dist.get_world_size())
    size = sum(param.numel() * param.element_size() for param in whole.parameters())
    step, count, read = _SYSTEMS[name](whole), 0, SharedMemoryCollectives.read

    def counted(self: SharedMemoryCollectives, *arguments: Any, **options: Any) -> Iterator[Any]:
        nonlocal count
        for part, window in read(self, *arguments, **options):
            count += window.numel() * window.element_size()
            yield part, window

    step(batch)
    with mock.patch.object(SharedMemoryCollectives, "read", counted):
        step(batch)
    return count / size


def formula(stage: int, ranks: int) -> float:
    """Return the volume of a step in sizes of the model, in one direction (arXiv 1910.02054, section 7)."""
    return {1: 2, 2: 2, 3: 3}[stage] * (ranks - 1) / ranks


def report(quick: bool) -> str:
    layers, repeats = (2, 2) if quick else (12, 3)
    sections = [
        table(
            "ZeRO stages against DDP, FSDP2 and DeepSpeed",
            ["model", "dp", "ours", "other", "our speed / its speed", "its peak / ours", "our peak MiB"],
            [
                row
                for model in ("BERT-base", "Llama")
                for ranks in (2, 4)
                for row in _compared(model, ranks, ranks, PAIRS, layers, repeats)
            ],
            f"{layers} layers, global batch {_ROWS} x {_LENGTH}. Above 1.0 ours is faster, or smaller. The peak "
            "includes the construction of the whole model on each rank.",
        ),
        table(
            "ZeRO stages with tensor and pipeline parallelism",
            ["model", "dp", "ours", "other", "our speed / its speed", "its peak / ours", "our peak MiB"],
            list(_compared("Llama", 4, 2, COMBINED_PAIRS, layers, repeats)),
            f"4 ranks, {layers} layers, global batch {_ROWS} x {_LENGTH}; a pipeline runs 4 micro-batches. A stage "
            "that gathers its layers for every micro-batch gives time for memory.",
        ),
        table(
            "Bytes that a rank receives in a step of ZeRO, in sizes of the model",
            ["model", "dp", "stage", "counted", "formula"],
            [
                ["Llama", ranks, stage, run_ranks(bytes_moved, ranks, "Llama", f"ours, stage {stage}", layers), right]
                for ranks in (2, 4)
                for stage in (1, 2, 3)
                for right in [formula(stage, ranks)]
            ],
            "The formula counts a reduce-scatter and one all-gather for stages 1 and 2, one more for stage 3. At "
            "stage 3 embeddings are gathered once: the gradient of a lookup does not read the table.",
        ),
    ]
    return "\n".join(sections)


def _compared(
    model: str, ranks: int, replicas: int, pairs: tuple[tuple[str, str], ...], layers: int, repeats: int
) -> Iterator[list[object]]:
    """Yield a row for each pair of systems."""
    pairs = tuple(pair for pair in pairs if is_installed(pair[1]))
    peaks = {
        name: run_ranks(peak, ranks, model, name, layers, replicas)
        for name in dict.fromkeys(name for pair in pairs for name in pair)
    }
    for mine, other in pairs:
        faster = run_ranks(speed, ranks, model, mine, other, layers, replicas, repeats)
        row = [model, replicas, mine, other, faster, peaks[other] / peaks[mine], round(peaks[mine] / 2**20)]
        print(*row, file=sys.stderr, flush=True)  # a row takes minutes
        yield row
