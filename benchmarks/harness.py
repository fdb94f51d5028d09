"""Timing of several ways to do the same work in turn (A B A B ...), on ranks of one thread."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    mp.spawn(_rank, args=(world_size, port, function, arguments, results), nprocs=world_size)
    return results.get()


def table(title: str, columns: list[str], rows: list[list[Any]], note: str = "") -> str:
    """Format a Markdown section with one table."""
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(_cell(value) for value in row) for row in rows]
    body = "\n".join(f"| {line} |" for line in lines)
    return f"## {title}\n\n{body}\n" + (f"\n{note}\n" if note else "")


def _rank(rank: int, world_size: int, port: int, function: Callable[..., Any], arguments: tuple, results: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = function(*arguments)
    if rank == 0:
        results.put(result)
    dist.barrier()
    dist.destroy_process_group()


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
