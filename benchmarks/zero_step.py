"""A data-parallel training step of BERT-base (110 million parameters): ZeRO-1 of this package against four others.

A global batch of 8 sequences of 128 tokens, AdamW, one thread a rank. Times: ours and one other system at a time live
in the same ranks and take turns. Peak memory: each system by itself in new processes, the fullest rank's `ru_maxrss`
above what it was with everything imported.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.harness import ratio, run_ranks, table, turns
from benchmarks.zero_systems import SYSTEMS, Batch, Step, bert, device, is_installed

GLOBAL_ROWS, LENGTH = 8, 128


def batch_of_rank() -> Batch:
    """This rank's share of the global batch."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = GLOBAL_ROWS // dist.get_world_size()
    return {
        "input_ids": torch.randint(1, 30000, (rows, LENGTH), generator=generator).to(device()),
        "labels": torch.randint(0, 2, (rows,), generator=generator).to(device()),
    }


def compare(other: str, layers: int, repeats: int) -> float:
    """How many times as fast ours is."""
    batch = batch_of_rank()
    steps = {name: SYSTEMS[name](bert(layers)) for name in ("ours", other)}
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in steps}

    def run(name: str, step: Step) -> Callable[[], None]:
        return lambda: losses[name].append(step(batch))

    times = turns({name: run(name, step) for name, step in steps.items()}, repeats, warm_up=2)
    _check_alike(losses["ours"], losses[other])
    return ratio(times, "ours", other)


def peak(name: str, layers: int) -> int:
    """Bytes of the fullest rank above what it had before there was a model."""
    before = _peak_bytes()
    batch = batch_of_rank()
    step = SYSTEMS[name](bert(layers))
    for _ in range(3):
        step(batch)
    fullest = torch.tensor(_peak_bytes() - before, device=device())
    dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
    return int(fullest)


def report(quick: bool) -> str:
    layers, repeats = (2, 2) if quick else (12, 7)
    rows: list[list[object]] = []
    for ranks in (2, 4):
        peaks = {name: run_ranks(peak, ranks, name, layers) for name in SYSTEMS if is_installed(name)}
        for name in SYSTEMS:
            if not is_installed(name):
                rows.append([ranks, name, "not installed", "not installed"])
                continue
            speed = 1.0 if name == "ours" else run_ranks(compare, ranks, name, layers, repeats)
            rows.append([ranks, name, speed, peaks[name] / peaks["ours"]])
    return table(
        "ZeRO-1: a step of BERT-base against other systems",
        ["dp", "system", "our speed / its speed", "its peak memory / ours"],
        rows,
        f"Global batch {GLOBAL_ROWS} x {LENGTH}, {layers} layers. Above 1.0 ours is the faster, or the smaller.",
    )


def _check_alike(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """The same training: losses, averaged over the ranks where a system leaves that to its caller, agree."""
    for mine, other in zip(ours, theirs, strict=True):
        mean = other.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mine.float(), mean / dist.get_world_size(), rtol=2e-2, atol=2e-3)


def _peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
