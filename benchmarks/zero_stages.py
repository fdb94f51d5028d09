"""ZeRO stages 1 to 3 of this package against DDP, FSDP2 and DeepSpeed: time and peak memory of a data-parallel step.

BERT-base and a Llama of hidden size 768, AdamW, one thread per rank. In each run one of our stages and another system
share the ranks and take turns; for memory each system runs alone in new processes (see `zero_memory`).
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import ratio, run_ranks, table, turns
from benchmarks.zero_systems import COMBINED, STAGES, Batch, bert, device, is_installed, llama

# Ranks -> pairs of our stage and what shards as much; DDP shards nothing.
_TORCH = (
    ("ours, stage 2", "DDP + fused AdamW"),
    ("ours, stage 2", "FSDP2, reshard_after_forward=False"),
    ("ours, stage 3", "FSDP2"),
)
_DEEPSPEED = (("ours, stage 2", "DeepSpeed ZeRO-2"), ("ours, stage 3", "DeepSpeed ZeRO-3"))
PAIRS = {2: (("ours, stage 1", "DDP + fused AdamW"), *_TORCH, *_DEEPSPEED), 4: _TORCH}
_ROWS, _LENGTH = 8, 128  # of a global batch
_SYSTEMS = STAGES | COMBINED
COLUMNS = ["model", "dp", "ours", "other", "our speed / its speed", "its peak / ours", "our peak MiB"]


def model_and_batch(name: str, layers: int, replicas: int, replica: int) -> tuple[nn.Module, Batch]:
    """Create a model and the share of a global batch of one replica."""
    generator = torch.Generator().manual_seed(replica)
    rows = _ROWS // replicas
    ids = torch.randint(1, 30000, (rows, _LENGTH), generator=generator).to(device())
    if name == "Llama":
        return llama(layers), {"input_ids": ids, "labels": ids}
    return bert(layers), {"input_ids": ids, "labels": torch.randint(0, 2, (rows,), generator=generator).to(device())}


def replica_of(system: str, replicas: int) -> int:
    """Return the replica of this rank: those of a pipeline are stage by stage, others are neighbours."""
    rank = dist.get_rank()
    return rank % replicas if "pp2" in system else rank * replicas // dist.get_world_size()


def speed(model: str, mine: str, other: str, layers: int, replicas: int, repeats: int) -> float:
    """Return the ratio of our speed to the other system's."""
    replica = replica_of(mine, replicas)
    _, batch = model_and_batch(model, 1, replicas, replica)
    steps = {name: _SYSTEMS[name](model_and_batch(model, layers, replicas, replica)[0]) for name in (mine, other)}
    times = turns({name: lambda step=step: step(batch) for name, step in steps.items()}, repeats, warm_up=1)
    return ratio(times, mine, other)


def peak(model: str, name: str, layers: int, replicas: int) -> int:
    """Return the increase of peak memory in bytes since before the model was created, maximum over ranks."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    whole, batch = model_and_batch(model, layers, replicas, replica_of(name, replicas))
    step = _SYSTEMS[name](whole)
    del whole
    for _ in range(3):
        step(batch)
    fullest = torch.tensor((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
    dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
    return int(fullest)


def compared(
    model: str, ranks: int, replicas: int, pairs: tuple[tuple[str, str], ...], quick: bool
) -> Iterator[list[object]]:
    """Yield a row for each pair of systems."""
    layers, repeats = sizes(quick)
    pairs = tuple(pair for pair in pairs if is_installed(pair[1]))
    peaks: dict[str, int] = {}
    for mine, other in pairs:
        for name in (mine, other):
            if name not in peaks:
                peaks[name] = run_ranks(peak, ranks, model, name, layers, replicas)
        faster = run_ranks(speed, ranks, model, mine, other, layers, replicas, repeats)
        row = [model, replicas, mine, other, faster, peaks[other] / peaks[mine], round(peaks[mine] / 2**20)]
        print(*row, file=sys.stderr, flush=True)  # a row takes minutes
        yield row


def sizes(quick: bool) -> tuple[int, int]:
    """Return the number of layers, and of turns."""
    return (2, 2) if quick else (12, 3)


def note(quick: bool) -> str:
    """Return what the columns mean."""
    return (
        f"{sizes(quick)[0]} layers, global batch {_ROWS} x {_LENGTH}. Above 1.0 ours is faster, or smaller. The peak "
        "includes the construction of the whole model on each rank."
    )


def report(quick: bool) -> str:
    rows = [
        row
        for model in ("BERT-base", "Llama")
        for ranks, pairs in PAIRS.items()
        for row in compared(model, ranks, ranks, pairs, quick)
    ]
    return table("ZeRO stages against DDP, FSDP2 and DeepSpeed", COLUMNS, rows, note(quick))
