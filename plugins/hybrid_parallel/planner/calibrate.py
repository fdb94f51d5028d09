"""Measure this machine as a `Device`: links, kernels and the layers of the planned model, on all ranks concurrently.

Links: a step of an algorithm is a message that must arrive before the next one is sent. A ring of n ranks takes n - 1
steps for an all-gather or a reduce-scatter and 2 (n - 1) for an all-reduce. A rank sends (n - 1) / n of the buffer, or
twice that for an all-reduce. The time of a collective is modelled as steps * latency + sent bytes / bandwidth.

Layers: one device runs them, with the other tensor-parallel ranks simulated.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.local_ranks import devices_for, run_on_local_ranks
from plugins.hybrid_parallel.distributed.mesh import current_device
from plugins.hybrid_parallel.planner.device import Device, Link
from plugins.hybrid_parallel.planner.op_recorder import Part
from plugins.hybrid_parallel.planner.proxy_model import batch_of, build_proxy_model, training_loss, watch_layers
from plugins.hybrid_parallel.shard_report import fake_rank
from plugins.hybrid_parallel.step.passes import Pass, PassKind, in_pass
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
    steps: int  # steps of the algorithm, see the top of this file
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
    """Operation to be measured."""

    # name, steps: see `CollectiveMeasurement`
    name: str
    steps: int
    sent: float  # fraction of the buffer that a rank sends
    run: Callable[[], Any]  # runs the operation `times` times
    times: int = 1  # number of operations in one call of `run`


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
        point_to_point: measure messages between neighbours, as pipeline stages send them, instead of collectives.
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
        start = _now(device)
        for _ in range(calls):
            operation.run()
        times.append((_now(device) - start) / calls / operation.times)
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return statistics.median(slowest.tolist())


def _now(device: torch.device) -> float:
    """Return the current time in seconds, after all launched kernels are done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class Case:
    """Measured case: a way of sharding layers, and a micro-batch size."""

    tp_size: int
    sequence: bool
    rows: int


@dataclass(frozen=True)
class PartTimes:
    """Seconds that one part takes for one micro-batch."""

    forward: float
    backward: float


@dataclass(frozen=True)
class MeasuredParts:
    """Measured times for one micro-batch size."""

    parts: Mapping[Part, PartTimes]  # part of the pruned model -> its times
    optimizer: float  # seconds after the passes (mainly the update) per trained element


class PartTimer:
    """Listener that adds up the time of each part; the hooks of `watch_layers` call it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, {}
        self.backwards, self.part = False, ("gap", 0)
        self._since = 0.0

    def begin(self) -> None:
        """Start a forward pass."""
        self.backwards, self.part = False, ("gap", 0)
        self._since = self.now()

    def enter(self, part: Part) -> None:
        """Book the time since the last call on the previous part, and switch to `part`."""
        now = self.now()
        key = (self.part, self.backwards)
        self.seconds[key] = self.seconds.get(key, 0.0) + now - self._since
        self.part, self._since = part, now

    def turn(self) -> None:
        """Start the backward pass."""
        self.enter(self.part)
        self.backwards = True

    def give(self, hidden: Tensor) -> None:
        """Ignore the hidden state: timing does not need sizes."""

    def now(self) -> float:
        """Return the current time in seconds, after all launched kernels are done."""
        return _now(self.device)


def measure_parts(
    build: Callable[[], nn.Module],
    config: HybridParallelConfig,
    device: torch.device,
    rows: int,
    length: int,
    repeats: int = 5,
    enough_s: float = 2.0,
) -> MeasuredParts:
    """Train the pruned model of a model on one device for a few steps, and time its parts.

    Args:
        config: only its tensor parallelism is simulated, in its precision; the prediction accounts for the rest.
        rows: samples of a micro-batch.
        length: tokens of a sample.
        repeats: number of timed steps, after one warm-up step; the median is taken.
        enough_s: seconds after which no further step is timed.
    """
    tp_size, sequence = config.parallel.tp_size, config.parallel.enable_sequence_parallelism
    config = HybridParallelConfig.from_options(
        tp_size=tp_size, enable_sequence_parallelism=sequence, precision=config.mixed_precision.precision
    )
    with fake_rank(0, tp_size):
        model, lists, wrapped = build_proxy_model(build, config, optimizer=torch.optim.AdamW, device=device)
        (optimizer,) = wrapped.optimizers
        batch = batch_of(model, rows, length, str(device))
        if "input_ids" in batch:  # random tokens, so that they are routed to different experts
            batch["input_ids"] = torch.randint_like(batch["input_ids"], model.config.get_text_config().vocab_size)
        timer = PartTimer(device)
        watch_layers(model, lists, timer)
        found: list[dict[tuple[Part, bool], float]] = []
        updates, started = [], timer.now()
        for _ in range(repeats + 1):
            if len(found) > 1 and timer.now() - started > enough_s:
                break
            timer.seconds = {}
            timer.begin()
            with in_pass(wrapped, Pass(PassKind.STEP)):
                loss = training_loss(wrapped, batch)
                timer.turn()
                loss.backward()
                timer.enter(("gap", 0))
            began = timer.now()
            optimizer.reducer.finish()
            optimizer.step()
            optimizer.zero_grad()
            updates.append(timer.now() - began)
            found.append(timer.seconds)
    elements = sum(bucket.flat.numel() for bucket in optimizer.buckets)
    median = {key: statistics.median(each.get(key, 0.0) for each in found[1:]) for key in found[-1]}
    parts = {part: PartTimes(median.get((part, False), 0.0), median.get((part, True), 0.0)) for part, _ in median}
    return MeasuredParts(parts, statistics.median(updates[1:]) / elements)


_TIMEOUT_S = 600.0
_MATMUL_SIZES = (128, 256, 512, 1024)


@dataclass(frozen=True)
class Calibration:
    """Measurements of this machine."""

    device: Device
    # case -> the times of the model's parts; cases in which the model cannot be sharded are left out
    parts: Mapping[Case, MeasuredParts]


def calibrate(
    build: Callable[[], nn.Module],
    world_size: int,
    length: int,
    precision: str,
    cases: Sequence[Case],
    timeout_s: float = _TIMEOUT_S,
) -> Calibration:
    """Measure this machine with as many concurrent ranks as it has GPUs (or CPU cores), `world_size` at most.

    Args:
        build: builds the model. It is also called in other processes, so it must be a module-level function or a
            `functools.partial` of one.
        length: tokens of a sample.
        precision: training precision.
        cases: combinations of sharding and micro-batch size to measure.

    Raises:
        ConfigurationError: the model cannot be trained on this machine.
    """
    kind = devices_for(1)
    room = torch.cuda.device_count() if kind == "cuda" else len(os.sched_getaffinity(0))
    ranks = max(1, min(world_size, room))
    found = run_on_local_ranks(
        _measure, ranks, build, length, precision, tuple(cases), timeout_s=timeout_s, device=kind
    )
    return slowest(found)


def _total(parts: MeasuredParts) -> float:
    return sum(each.forward + each.backward for each in parts.parts.values())


def _measure(
    build: Callable[[], nn.Module], length: int, precision: str, cases: Sequence[Case]
) -> tuple[Device, dict[Case, MeasuredParts]]:
    """Measure the link and the kernels on each rank, then the layers without the process group."""
    device, ranks = current_device(), dist.get_world_size()
    link = measure_link(device)
    dist.destroy_process_group()
    return measure_device(device, build, length, precision, cases, link, link, max(ranks, 8), ranks)


def measure_device(
    device: torch.device,
    build: Callable[[], nn.Module],
    length: int,
    precision: str,
    cases: Sequence[Case],
    inside: Link,
    between: Link,
    node_size: int,
    ranks: int,
) -> tuple[Device, dict[Case, MeasuredParts]]:
    """Measure the kernels and the layers of a model on a device, without a process group.

    Args:
        device: this rank's device, which is not known without the process group.
        ranks: number of ranks that share this machine's memory.
    """
    rate, half, bandwidth = _kernels(device, precision)
    found = {}
    for case in cases:
        options = {"tp_size": case.tp_size, "enable_sequence_parallelism": case.sequence}
        try:
            config = HybridParallelConfig.from_options(**options, precision=precision)
            found[case] = measure_parts(build, config, device, case.rows, length)
        except ConfigurationError:  # the search runs into the same error and reports it
            continue
    if not found:
        raise ConfigurationError("this model cannot be trained on this machine; plan for a device by its name")
    update = statistics.median(each.optimizer for each in found.values())
    described = Device(
        name="this-machine",
        memory=_memory(device, ranks),
        flops=dict.fromkeys(("fp32", "bf16", "fp16", "fp8"), rate),
        matmul_efficiency=1.0,
        matmul_half=half,
        attention_efficiency=0.5,
        bandwidth=bandwidth,
        inside=inside,
        between=between,
        node_size=node_size,
        operator=0.0,
        optimizer_bytes=update * bandwidth,
        master_bytes=0.0,
        overlap=0.0 if device.type == "cpu" else 0.7,  # gloo and the passes compete for the same cores
    )
    return described, found


def slowest(found: Sequence[tuple[Device, Mapping[Case, MeasuredParts]]]) -> Calibration:
    """Combine what the ranks have measured: of each case the slowest."""
    device, parts = found[0]
    return Calibration(device, {case: max((each[1][case] for each in found), key=_total) for case in parts})


def measure_link(device: torch.device, group: ProcessGroup | None = None) -> Link:
    """Measure the latency and the bandwidth of each collective over all ranks, or those of a group."""
    group = group or dist.group.WORLD
    if dist.get_world_size(group) == 1:
        return Link(0.0, float("inf"))
    found = measure_axis(group, device)
    largest = max(each.num_bytes for each in found.collectives)
    rates = {}
    for each in found.collectives:
        if each.num_bytes == largest:
            # Latencies are noisy: subtracting them must leave at least 10 % of the time of a large buffer.
            seconds = max(each.seconds - each.steps * found.latency_s, 0.1 * each.seconds)
            rates[each.operation] = each.bus_bandwidth * each.seconds / seconds
    return Link(found.latency_s, rates["all_reduce"], rates)


def _kernels(device: torch.device, precision: str) -> tuple[float, float, float]:
    """Measure the FLOP/s of large matmuls, the FLOPs at which half of that is reached, and elementwise bytes/s."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}.get(precision, torch.float32)
    times = {}
    for size in _MATMUL_SIZES if device.type == "cpu" else [each * 8 for each in _MATMUL_SIZES]:
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        times[2.0 * size**3] = _median_seconds(lambda matrix=matrix: matrix @ matrix, device)
    rate = max(flops / seconds for flops, seconds in times.items())
    smallest = min(times)
    half = max(0.0, smallest * (rate * times[smallest] / smallest - 1))
    long = torch.ones(2**24 if device.type == "cpu" else 2**28, device=device)
    out: Tensor = torch.empty_like(long)
    seconds = _median_seconds(lambda: torch.mul(long, 2.0, out=out), device)
    return rate, half, 2 * long.numel() * long.element_size() / seconds


def _median_seconds(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        began = _now(device)
        work()
        times.append(_now(device) - began)
    return statistics.median(times[1:])


def _memory(device: torch.device, ranks: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
