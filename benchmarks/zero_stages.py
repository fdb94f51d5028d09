"""ZeRO stages 1 to 3 of this package against DDP and FSDP2: time and peak memory of a data-parallel step.

BERT-base and a Llama of hidden size 768, AdamW, one thread per rank. In each run one of our stages and another system
share the ranks and take turns; for memory each system runs alone in new processes (see `zero_memory`).
"""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import ratio, run_ranks, table, turns
from benchmarks.zero_systems import STAGES, Batch, bert, device, llama

# Our stage and what shards as much; DDP shards nothing.
PAIRS = (
    ("ours, stage 1", "DDP + fused AdamW"),
    ("ours, stage 2", "DDP + fused AdamW"),
    ("ours, stage 2", "FSDP2, reshard_after_forward=False"),
    ("ours, stage 3", "FSDP2"),
)
_ROWS, _LENGTH = 8, 128  # of a global batch


def model_and_batch(name: str, layers: int) -> tuple[nn.Module, Batch]:
    """Create a model and this rank's share of a global batch."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = _ROWS // dist.get_world_size()
    ids = torch.randint(1, 30000, (rows, _LENGTH), generator=generator).to(device())
    if name == "Llama":
        return llama(layers), {"input_ids": ids, "labels": ids}
    return bert(layers), {"input_ids": ids, "labels": torch.randint(0, 2, (rows,), generator=generator).to(device())}


def speed(model: str, mine: str, other: str, layers: int, repeats: int) -> float:
    """Return the ratio of our speed to the other system's."""
    _, batch = model_and_batch(model, 1)
    steps = {name: STAGES[name](model_and_batch(model, layers)[0]) for name in (mine, other)}
    times = turns({name: lambda step=step: step(batch) for name, step in steps.items()}, repeats, warm_up=2)
    return ratio(times, mine, other)


def peak(model: str, name: str, layers: int) -> int:
    """Return the increase of peak memory in bytes since before the model was created, maximum over ranks."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    whole, batch = model_and_batch(model, layers)
    step = STAGES[name](whole)
    del whole
    for _ in range(3):
        step(batch)
    fullest = torch.tensor((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
    dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
    return int(fullest)


def report(quick: bool) -> str:
    layers, repeats = (2, 2) if quick else (12, 5)
    rows: list[list[object]] = []
    for model in ("BERT-base", "Llama"):
        for ranks in (2, 4):
            peaks = {name: run_ranks(peak, ranks, model, name, layers) for name in STAGES}
            for mine, other in PAIRS:
                faster = run_ranks(speed, ranks, model, mine, other, layers, repeats)
                rows.append([model, ranks, mine, other, faster, peaks[other] / peaks[mine], round(peaks[mine] / 2**20)])
    return table(
        "ZeRO stages against DDP and FSDP2",
        ["model", "dp", "ours", "other", "our speed / its speed", "its peak / ours", "our peak MiB"],
        rows,
        f"{layers} layers, global batch {_ROWS} x {_LENGTH}. Above 1.0 ours is faster, or smaller. The peak includes "
        "the construction of the whole model on each rank.",
    )
