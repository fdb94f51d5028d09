"""Data-parallel step time of BERT-base (110 million parameters): ZeRO-1 of this package against four other systems.

AdamW, one thread per rank, and two global batches: 4 sequences of 32 tokens, where gradients and update take most of
the step, and 8 of 128, where matrix products do. Ours and one other system at a time share the same ranks and take
turns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.harness import ratio, run_ranks, table, turns
from benchmarks.zero_systems import SYSTEMS, Batch, Step, bert, device, is_installed

BATCHES = ((4, 32), (8, 128))  # global rows, length


def batch_of_rank(global_rows: int, length: int) -> Batch:
    """Create this rank's share of a global batch."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = global_rows // dist.get_world_size()
    return {
        "input_ids": torch.randint(1, 30000, (rows, length), generator=generator).to(device()),
        "labels": torch.randint(0, 2, (rows,), generator=generator).to(device()),
    }


def compare(other: str, layers: int, repeats: int) -> list[float]:
    """Return the ratio of our speed to the other system's, for each batch."""
    steps = {name: SYSTEMS[name](bert(layers)) for name in ("ours", other)}
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in steps}

    def run(name: str, step: Step, batch: Batch) -> Callable[[], None]:
        return lambda: losses[name].append(step(batch))

    ratios = []
    for shape in BATCHES:
        batch = batch_of_rank(*shape)
        times = turns({name: run(name, step, batch) for name, step in steps.items()}, repeats, warm_up=2)
        ratios.append(ratio(times, "ours", other))
    _check_alike(losses["ours"], losses[other])
    return ratios


def report(quick: bool) -> str:
    layers, repeats = (2, 2) if quick else (12, 7)
    rows: list[list[object]] = []
    for ranks in (2, 4):
        for name in SYSTEMS:
            if not is_installed(name):
                rows.append([ranks, name, *["not installed"] * len(BATCHES)])
                continue
            speeds = [1.0] * len(BATCHES) if name == "ours" else run_ranks(compare, ranks, name, layers, repeats)
            rows.append([ranks, name, *speeds])
    return table(
        "ZeRO-1: a step of BERT-base against other systems",
        [
            "dp",
            "system",
            *(f"our speed / its speed, {count} x {length}" for count, length in BATCHES),
        ],
        rows,
        f"{layers} layers; batch sizes are global. Above 1.0 ours is faster.",
    )


def _check_alike(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Check that the losses agree; they are averaged over ranks, as some systems leave that to the caller."""
    for mine, other in zip(ours, theirs, strict=True):
        mean = other.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mine.float(), mean / dist.get_world_size(), rtol=2e-2, atol=2e-3)
