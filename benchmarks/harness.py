"""Timing of several ways to do the same work in turn (A B A B ...), on ranks of one thread."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from plugins.hybrid_parallel.distributed.local_ranks import run_on_local_ranks

_TIMEOUT_S = 3600.0


def medians(ways: Mapping[str, Callable[[], None]], repeats: int, warm_up: int = 1) -> dict[str, float]:
    """Return the median seconds of each way, see `turns`."""
    return {name: statistics.median(values) for name, values in turns(ways, repeats, warm_up).items()}


def turns(
    ways: Mapping[str, Callable[[], None]],
    repeats: int,
    warm_up: int = 1,
    before: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Return the seconds of each way in each turn; ways alternate, so that a drift of the machine affects all equally.

    All ranks start a way together, and its time is that of the slowest rank.

    Args:
        ways: name -> work to time.
        repeats: number of timed turns.
        warm_up: number of turns before them that are not timed.
        before: called before each way, not included in its time.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(warm_up + repeats):
        for name, work in ways.items():
            before()
            _barrier()
            start = time.perf_counter()
            work()
            _barrier()
            if turn >= warm_up:
                times[name].append(time.perf_counter() - start)
    return times


def ratio(times: Mapping[str, Sequence[float]], way: str, other: str) -> float:
    """Return the speed of `way` relative to `other`: the median over the turns."""
    return statistics.median(theirs / ours for ours, theirs in zip(times[way], times[other], strict=True))


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> Any:
    """Run `function(*arguments)` on every rank of a new gloo group; return rank 0's result."""
    return run_on_local_ranks(_as_job, world_size, function, arguments, timeout_s=_TIMEOUT_S)[0]


def table(title: str, columns: list[str], rows: list[list[Any]], note: str = "") -> str:
    """Format a Markdown section with one table."""
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(_cell(value) for value in row) for row in rows]
    body = "\n".join(f"| {line} |" for line in lines)
    return f"## {title}\n\n{body}\n" + (f"\n{note}\n" if note else "")


def _as_job(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run a function with the environment of a job, which DeepSpeed reads; the port is not used."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    result = function(*arguments)
    dist.barrier()
    return result if rank == "0" else None


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
