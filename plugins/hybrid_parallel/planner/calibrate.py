"""Measure this machine as a `Device`: link, kernels and the layers of the planned model, on all ranks concurrently."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.local_ranks import devices_for, run_on_local_ranks
from plugins.hybrid_parallel.distributed.mesh import current_device
from plugins.hybrid_parallel.planner.device import Device, Link
from plugins.hybrid_parallel.planner.kernel_timing import Case, MeasuredParts, measure_parts
from plugins.hybrid_parallel.planner.link_benchmark import measure_axis

_TIMEOUT_S = 600.0
_MATMUL_SIZES = (128, 256, 512, 1024)
_REPEATS = 7


@dataclass(frozen=True)
class Calibration:
    """Measurements of this machine.

    Attributes:
        device: this machine.
        parts: case -> the times of the model's parts; cases in which the model cannot be sharded are left out.
    """

    device: Device
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
        world_size: number of ranks of the planned layouts.
        length: tokens of a sample.
        precision: training precision, "fp32", "bf16" or "fp16".
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
        build, length, precision, cases: see `calibrate`.
        inside, between: the links of a machine and of its network.
        node_size: number of ranks of a machine.
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
        flops=dict.fromkeys(("fp32", "bf16", "fp16"), rate),
        matmul_efficiency=1.0,
        matmul_half=half,
        attention_efficiency=0.5,
        bandwidth=bandwidth,
        inside=inside,
        between=between,
        node_size=node_size,
        operator=0.0,
        optimizer_bytes=update * bandwidth,
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
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
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
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _memory(device: torch.device, ranks: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
