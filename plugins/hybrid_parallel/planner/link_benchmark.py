"""Benchmark the links along an axis of the mesh: latency and bandwidth of the operations that training uses.

A step of an algorithm is a message that must arrive before the next one is sent. A ring of n ranks takes n - 1 steps
for an all-gather or a reduce-scatter and 2 (n - 1) for an all-reduce. A rank sends (n - 1) / n of the buffer, or twice
that for an all-reduce. The time of a collective is modelled as steps * latency + sent bytes / bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardformer.distributed.collectives import all_gather_flat, reduce_scatter_flat

_SMALL_BYTES = 8
LARGE_BYTES = (2**20, 2**23)
_REPEATS = 7
_SMALL_CALLS = 20  # calls averaged in one latency measurement
_WARM_UPS = 2


@dataclass(frozen=True)
class CollectiveMeasurement:
    """Measurement of one operation on a large buffer."""

    operation: str  # "all_reduce", "all_gather", "reduce_scatter" or "send"
    num_bytes: int  # size of the whole buffer
    steps: int  # steps of the algorithm, see the module docstring
    seconds: float  # median time of the slowest rank
    algorithm_bandwidth: float  # buffer bytes per second
    bus_bandwidth: float  # bytes that a rank sends per second


@dataclass(frozen=True)
class LinkMeasurement:
    """Measurement of the links along one mesh axis."""

    num_ranks: int  # number of ranks on the axis
    latency_s: float  # latency of a message of a few bytes; for collectives, of one step of an all-reduce
    small_s: float  # time of the whole small operation, a message or an all-reduce
    bandwidth_bytes_per_s: float  # bytes that a rank sends per second, in the fastest measurement
    collectives: tuple[CollectiveMeasurement, ...]  # measurements on large buffers


@dataclass(frozen=True)
class _Operation:
    """Operation to be measured.

    Attributes:
        name, steps: see `CollectiveMeasurement`.
        sent: fraction of the buffer that a rank sends.
        run: runs the operation `times` times.
        times: number of operations in one call of `run`.
    """

    name: str
    steps: int
    sent: float
    run: Callable[[], Any]
    times: int = 1


def measure_axis(
    group: ProcessGroup,
    device: torch.device,
    point_to_point: bool = False,
    sizes: Sequence[int] = LARGE_BYTES,
    repeats: int = _REPEATS,
) -> LinkMeasurement:
    """Measure the links of a process group.

    Collective: all ranks of the group must call this with the same arguments. Other groups may be measured
    concurrently.

    Args:
        group: the process group.
        device: device of the buffers.
        point_to_point: measure messages between neighbours, as pipeline stages send them, instead of collectives.
        sizes: bytes of the large buffers.
        repeats: number of measurements; the median is reported.
    """
    operations_on = _messages if point_to_point else _collectives
    small, *_ = operations_on(_SMALL_BYTES, group, device)
    small_s = _median_time(small, group, device, repeats, _SMALL_CALLS)
    found = []
    for num_bytes in sizes:
        for each in operations_on(num_bytes, group, device):
            seconds = _median_time(each, group, device, repeats)
            speed = num_bytes / seconds
            found.append(CollectiveMeasurement(each.name, num_bytes, each.steps, seconds, speed, each.sent * speed))
    best = max(each.bus_bandwidth for each in found)
    return LinkMeasurement(dist.get_world_size(group), small_s / small.steps, small_s, best, tuple(found))


def _collectives(num_bytes: int, group: ProcessGroup, device: torch.device) -> list[_Operation]:
    num_ranks = dist.get_world_size(group)
    part = torch.ones(max(num_bytes // 4 // num_ranks, 1), device=device)
    whole = torch.ones(part.numel() * num_ranks, device=device)
    steps, share = num_ranks - 1, (num_ranks - 1) / num_ranks
    return [
        # MAX instead of SUM: the values stay the same over repeated calls.
        _Operation("all_reduce", 2 * steps, 2 * share, lambda: dist.all_reduce(whole, dist.ReduceOp.MAX, group=group)),
        _Operation("all_gather", steps, share, lambda: all_gather_flat(whole, part, group=group)),
        _Operation("reduce_scatter", steps, share, lambda: reduce_scatter_flat(part, whole, group=group)),
    ]


def _messages(num_bytes: int, group: ProcessGroup, device: torch.device) -> list[_Operation]:
    """Send messages back and forth between pairs of neighbours, first the pairs whose lower rank is even."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    buffer = torch.ones(max(num_bytes // 4, 1), device=device)
    phases = 1 if num_ranks == 2 else 2

    def ping_pong() -> None:
        for phase in range(phases):
            is_lower = (rank - phase) % 2 == 0
            other = rank + 1 if is_lower else rank - 1
            if not 0 <= other < num_ranks:
                continue
            if is_lower:
                dist.send(buffer, group=group, group_dst=other)
            dist.recv(buffer, group=group, group_src=other)
            if not is_lower:
                dist.send(buffer, group=group, group_dst=other)

    return [_Operation("send", 1, 1.0, ping_pong, times=2 * phases)]


def _median_time(
    operation: _Operation, group: ProcessGroup, device: torch.device, repeats: int, calls: int = 1
) -> float:
    """Return the seconds of one operation: the mean over `calls`, the maximum over ranks, the median over repeats."""
    for _ in range(_WARM_UPS):
        operation.run()
    times = []
    for _ in range(repeats):
        dist.barrier(group)
        _synchronise(device)
        start = time.perf_counter()
        for _ in range(calls):
            operation.run()
        _synchronise(device)
        times.append((time.perf_counter() - start) / calls / operation.times)
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return statistics.median(slowest.tolist())


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
