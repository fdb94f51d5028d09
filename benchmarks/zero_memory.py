"""Peak memory of a data-parallel step of BERT-base: ZeRO-1 of this package against four other systems.

Each system runs alone in new processes, for three steps of a global batch of 8 sequences of 128 tokens. The result is
the largest increase of `ru_maxrss` on any rank since all imports; memory shared by ranks is counted in each of them.
"""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist

from benchmarks.harness import run_ranks, table
from benchmarks.zero_step import BATCHES, batch_of_rank
from benchmarks.zero_systems import SYSTEMS, bert, device, is_installed


def peak(name: str, layers: int) -> int:
    """Return the increase of peak memory in bytes since before the model was created, maximum over ranks."""
    before = _peak_bytes()
    batch = batch_of_rank(*BATCHES[-1])
    step = SYSTEMS[name](bert(layers))
    for _ in range(3):
        step(batch)
    fullest = torch.tensor(_peak_bytes() - before, device=device())
    dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
    return int(fullest)


def report(quick: bool) -> str:
    layers = 2 if quick else 12
    rows: list[list[object]] = []
    for ranks in (2, 4):
        peaks = {name: run_ranks(peak, ranks, name, layers) for name in SYSTEMS if is_installed(name)}
        for name in SYSTEMS:
            found = (
                [round(peaks[name] / 2**20), peaks[name] / peaks["ours"]] if name in peaks else ["not installed"] * 2
            )
            rows.append([ranks, name, *found])
    return table(
        "ZeRO-1: peak memory of BERT-base against other systems",
        ["dp", "system", "peak MiB", "its peak / ours"],
        rows,
        f"{layers} layers, global batch {BATCHES[-1][0]} x {BATCHES[-1][1]}. Above 1.0 our peak is smaller.",
    )


def _peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
