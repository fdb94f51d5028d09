"""Plan the layout of a model on given devices: the entry points of `booster plan` and `auto_accelerate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.offload import CPU
from plugins.hybrid_parallel.distributed.local_ranks import run_on_local_ranks
from plugins.hybrid_parallel.planner.calibrate import Calibration, calibrate
from plugins.hybrid_parallel.planner.device import Device
from plugins.hybrid_parallel.planner.kernel_timing import Case
from plugins.hybrid_parallel.planner.packing import Packing
from plugins.hybrid_parallel.planner.predict import Predictor
from plugins.hybrid_parallel.planner.profile import Profiler
from plugins.hybrid_parallel.planner.pruned_model import name_in_skeleton
from plugins.hybrid_parallel.planner.quantised_base import QuantisedBase
from plugins.hybrid_parallel.planner.search import Plan, search
from plugins.hybrid_parallel.planner.space import Space
from plugins.hybrid_parallel.planner.stage_map import ModelMap
from plugins.hybrid_parallel.planner.synthetic_batch import batch_of
from shardformer.distributed.random import random_numbers_apart

_TIMEOUT_S = 600.0
_LEAST_TOKENS = 1024  # of a sample on a rank: with fewer, keys and values take longer to send than to use


@dataclass(frozen=True)
class Job:
    """Training job to be planned.

    Attributes:
        world_size: number of devices.
        global_batch: samples of a step, over all replicas.
        length: tokens of a sample.
        precision: "fp32", "bf16" or "fp16".
        largest_tp: maximum tensor-parallel size; None for the number of devices of a node.
        largest_cp: maximum context-parallel size; None for as many ranks as have 1024 tokens of a sample each.
        memory: bytes that a rank may use; None for those of the device.
        packing: the documents of packed rows; None for one document in each sample.
        quantised: how the frozen base is stored; None if it is not quantised.
        offload: where layouts may offload to if no other layout fits: "cpu" or a directory; None for nowhere.
        styles: pairs (pipeline schedule, stages per rank); None for all.
        zero_stages: ZeRO stages; None for all.
    """

    world_size: int
    global_batch: int
    length: int
    precision: str
    largest_tp: int | None = None
    largest_cp: int | None = None
    memory: float | None = None
    packing: Packing | None = None
    quantised: QuantisedBase | None = None
    offload: str | None = None
    styles: tuple[tuple[str, int], ...] | None = None
    zero_stages: tuple[int, ...] | None = None


@random_numbers_apart()
def plan_for(build: Callable[[], nn.Module], job: Job, device: Device | None) -> tuple[Plan, Device]:
    """Rank the layouts of a job.

    Args:
        build: builds the model; called on the meta device. If this machine is measured, other processes call it too.
        job: the training job.
        device: the device to plan for; None to measure this machine.

    Returns:
        The plan and the device that it is for.

    Raises:
        ConfigurationError: the planner knows no batch for the model, or the model cannot be built.
    """
    calibration = measured_for(build, job) if device is None else None
    return _search(build, job, device, calibration)


@random_numbers_apart()
def plan_apart(build: Callable[[], nn.Module], job: Job, device: Device | None) -> Plan:
    """Run `plan_for` in a separate process and return its plan.

    A rank of a running job needs this, because the planner simulates other ranks with a process group of its own.
    """
    calibration = measured_for(build, job) if device is None else None
    ((plan, _),) = run_on_local_ranks(_search_alone, 1, build, job, device, calibration, timeout_s=_TIMEOUT_S)
    return plan


def measured_for(build: Callable[[], nn.Module], job: Job) -> Calibration:
    """Measure this machine for every way of sharding the layers that the search of `job` considers."""
    space = _space(ModelMap(build), job, None)
    cases = [Case(tp, sequence, rows) for tp, sequence in space.cuts() for rows in _extremes(space)]
    return calibrate(build, job.world_size, job.length, job.precision, cases)


def _search_alone(
    build: Callable[[], nn.Module], job: Job, device: Device | None, calibration: Calibration | None
) -> tuple[Plan, Device]:
    dist.destroy_process_group()
    return _search(build, job, device, calibration)


def _search(
    build: Callable[[], nn.Module], job: Job, device: Device | None, calibration: Calibration | None
) -> tuple[Plan, Device]:
    model = ModelMap(build)
    batch_of(model.model, 1, job.length, "meta")  # fail early: an error here affects every layout
    space, rows, measured = _space(model, job, device), (1, 2), {}
    if calibration is not None:
        device, rows, measured = calibration.device, _extremes(space), calibration.parts
    if job.memory is not None:
        device = replace(device, memory=job.memory)
    quantised = frozenset() if job.quantised is None else job.quantised.names(model.model)
    names = frozenset(name_in_skeleton(name, model.lists) for name in quantised)
    profiler = Profiler(build, job.length, device, job.precision, rows, measured, job.quantised, names, job.packing)
    return search(Predictor(model, profiler), space), device


def _space(model: ModelMap, job: Job, device: Device | None) -> Space:
    node_size = device.node_size if device is not None else job.world_size
    if job.offload == CPU and device is not None and device.type == "cpu":
        raise ConfigurationError(f"offload to '{CPU}' changes nothing on CPU ranks; give a directory")
    chosen = {"styles": job.styles, "zero_stages": job.zero_stages}
    return Space(
        job.world_size,
        job.global_batch,
        job.precision,
        model.num_layers,
        job.largest_tp or node_size,
        _context_sizes(model, job),
        node_size=node_size,
        place=job.offload,
        **{name: value for name, value in chosen.items() if value is not None},
    )


def _context_sizes(model: ModelMap, job: Job) -> tuple[int, ...]:
    """Return the context-parallel sizes: powers of two that cut samples into two equal parts for each rank."""
    largest = job.largest_cp or job.length // _LEAST_TOKENS
    if not model.shares_sequences:
        return (1,)
    sizes = [2**power for power in range(job.world_size.bit_length())]
    return tuple(size for size in sizes if size == 1 or (size <= largest and job.length % (2 * size) == 0))


def _extremes(space: Space) -> tuple[int, int]:
    """Return the smallest and the largest micro-batch size; costs in between are interpolated."""
    rows = {layout.rows for layout in space.layouts()}
    if not rows:
        raise ConfigurationError(
            f"a global batch of {space.global_batch} samples is not divisible by any number of replicas of "
            f"{space.world_size} ranks; use a multiple of {space.world_size}"
        )
    return min(rows), max(*rows, min(rows) + 1)
