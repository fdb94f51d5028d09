"""How fast ranks reach each other along an axis of the mesh: latency and bandwidth, measured by what training does.

A step of an algorithm is a message that has to arrive before the next is sent. Rings of n ranks take n - 1 steps for an
all-gather or a reduce-scatter and 2 (n - 1) for an all-reduce, in which a rank sends (n - 1) / n, or twice that, of the
buffer: the time of a collective is modelled as steps * latency + sent bytes / bandwidth.
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
_SMALL_CALLS = 20  # of one measurement of latency
_WARM_UPS = 2


@dataclass(frozen=True)
class CollectiveMeasurement:
    """One operation on a large buffer.

    Attributes:
        operation: "all_reduce", "all_gather", "reduce_scatter" or "send".
        num_bytes: of the whole buffer.
        steps: of the algorithm, see above.
        seconds: median, of the slowest rank.
        algorithm_bandwidth: bytes of the buffer a second.
        bus_bandwidth: bytes that a rank sends a second.
    """

    operation: str
    num_bytes: int
    steps: int
    seconds: float
    algorithm_bandwidth: float
    bus_bandwidth: float


@dataclass(frozen=True)
class LinkMeasurement:
    """An axis.

    Attributes:
        num_ranks: on the axis.
        latency_s: of a message of a few bytes; for collectives, of one step of an all-reduce.
        small_s: of the whole small operation, a message or an all-reduce.
        bandwidth_bytes_per_s: that a rank sends, of the fastest measurement.
        collectives: the measurements on large buffers.
    """

    num_ranks: int
    latency_s: float
    small_s: float
    bandwidth_bytes_per_s: float
    collectives: tuple[CollectiveMeasurement, ...]


@dataclass(frozen=True)
class _Operation:
    """What is measured.

    Attributes:
        name, steps: see `CollectiveMeasurement`.
        sent: share of the buffer that a rank sends.
        run: the operation, `times` times.
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
    """Measure a group; all of its ranks call this alike, and other groups may be measured at the same time.

    Args:
        device: of the buffers.
        point_to_point: messages between neighbours, as the stages of a pipeline send them, in the place of collectives.
        sizes: bytes of the large buffers.
        repeats: measurements, of which the median counts.
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
        # The largest, not the sum: numbers stay what they are.
        _Operation("all_reduce", 2 * steps, 2 * share, lambda: dist.all_reduce(whole, dist.ReduceOp.MAX, group=group)),
        _Operation("all_gather", steps, share, lambda: all_gather_flat(whole, part, group=group)),
        _Operation("reduce_scatter", steps, share, lambda: reduce_scatter_flat(part, whole, group=group)),
    ]


def _messages(num_bytes: int, group: ProcessGroup, device: torch.device) -> list[_Operation]:
    """Pairs of neighbours send each other a message and back, first those that begin at an even rank."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    buffer = torch.ones(max(num_bytes // 4, 1), device=device)
    phases = 1 if num_ranks == 2 else 2

    def there_and_back() -> None:
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

    return [_Operation("send", 1, 1.0, there_and_back, times=2 * phases)]


def _median_time(
    operation: _Operation, group: ProcessGroup, device: torch.device, repeats: int, calls: int = 1
) -> float:
    """Seconds of one: the median over repeats of the slowest rank's mean over `calls`."""
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
