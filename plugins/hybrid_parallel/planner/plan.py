"""Plan the layout of a model on given devices: the search space, and its layouts that fit, ranked by step time.

`booster plan` and `auto_accelerate` enter here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch.distributed as dist
from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.groups import CPU
from plugins.hybrid_parallel.distributed.local_ranks import devices_for, run_on_local_ranks
from plugins.hybrid_parallel.distributed.mesh import control_group
from plugins.hybrid_parallel.planner.calibrate import Calibration, Case, calibrate
from plugins.hybrid_parallel.planner.costs import Memory, Prediction, TooLarge
from plugins.hybrid_parallel.planner.device import Device
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.op_recorder import TooManyOperators
from plugins.hybrid_parallel.planner.predict import Predictor
from plugins.hybrid_parallel.planner.profile import Profiler
from plugins.hybrid_parallel.planner.proxy_model import Packing, QuantisedBase, batch_of, name_in_skeleton
from plugins.hybrid_parallel.planner.stage_map import ModelMap
from shardformer.distributed.process_groups import all_gather_json
from shardformer.distributed.random import random_numbers_apart
from shardformer.lazy import record_module_init

RECOMPUTATIONS = (None, 0.5, "operators", "full")


@dataclass(frozen=True)
class Space:
    """Search space of layouts."""

    world_size: int  # number of devices
    global_batch: int  # samples of a step, over all replicas
    precision: str  # precision of parameters and activations
    num_layers: int  # number of layers, which limits the number of pipeline stages
    largest_tp: int = 8  # maximum tensor-parallel size; usually the number of devices of a node
    cp_sizes: tuple[int, ...] = (1,)  # context-parallel sizes
    ep_sizes: tuple[int, ...] = (1,)  # expert-parallel sizes
    # pairs (pipeline schedule, stages per rank)
    styles: tuple[tuple[str, int], ...] = (
        ("1f1b", 1),
        ("gpipe", 1),
        ("interleaved", 2),
        ("interleaved", 4),
        ("zero_bubble", 1),
        ("zero_bubble", 2),
        ("zbv", 2),
        ("dualpipev", 2),
    )
    rows: tuple[int, ...] = (1, 2, 4, 8, 16)  # micro-batch sizes, in samples
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)  # ZeRO stages, of 0 to 3
    node_size: int | None = None  # number of devices of a node; further layouts share states within nodes alone
    place: str | None = None  # where layouts offload to, "cpu" or a directory; None for layouts without offload only
    kernels: tuple[str, ...] = ()  # switches of the plugin that all layouts have

    def layouts(self) -> Iterator[Layout]:
        """Iterate over all layouts without offload, whether or not they fit into memory."""
        for tp_size, cp_size, pp_size in self._grids():
            dp_size = self.world_size // (tp_size * pp_size * cp_size)
            if self.global_batch % dp_size:
                continue
            share, replicas = self.global_batch // dp_size, dp_size * cp_size
            for (style, chunks), rows, sequence, recomputation, ep_size, (zero_stage, zero_size) in product(
                self._styles(pp_size),
                self._rows(share),
                (False, True) if tp_size > 1 else (False,),
                RECOMPUTATIONS,
                [size for size in self.ep_sizes if replicas % size == 0],
                list(self._sharing(tp_size, replicas)),
            ):
                yield Layout(
                    dp_size=dp_size,
                    tp_size=tp_size,
                    pp_size=pp_size,
                    cp_size=cp_size,
                    ep_size=ep_size,
                    sequence=sequence,
                    pp_style=style,
                    num_chunks=chunks,
                    rows=rows,
                    num_microbatches=share // rows,
                    recomputation=recomputation,
                    zero_stage=zero_stage,
                    zero_size=zero_size,
                    precision=self.precision,
                    kernels=self.kernels,
                )

    def offloaded(self) -> Iterator[Layout]:
        """Iterate over all layouts with offload of one or more kinds; none without a place."""
        if self.place is None:
            return
        for layout in self.layouts():
            for optimizer, parameters, activations in product((None, self.place), repeat=3):
                stage = 3 if parameters and layout.num_replicas == 1 else layout.zero_stage
                if (parameters is None or stage == 3) and (optimizer or parameters or activations):
                    yield replace(
                        layout,
                        zero_stage=stage,
                        offload_optimizer=optimizer,
                        offload_parameters=parameters,
                        offload_activations=activations,
                    )

    def left_out(self) -> list[tuple[str, str]]:
        """Return (mesh, reason) for each mesh whose layouts are all excluded."""
        found = []
        for tp_size, cp_size, pp_size in self._grids():
            dp_size = self.world_size // (tp_size * pp_size * cp_size)
            if self.global_batch % dp_size:
                grid = f"dp{dp_size} tp{tp_size} pp{pp_size}"
                found.append(
                    (grid, f"a global batch of {self.global_batch} samples does not divide by dp_size={dp_size}")
                )
        return found

    def cuts(self) -> list[tuple[int, bool]]:
        """Return the pairs (tensor-parallel size, whether activations are sequence-sharded) of the layouts."""
        sizes = sorted({tp_size for tp_size, _, _ in self._grids()})
        return [(size, sequence) for size in sizes for sequence in ((False, True) if size > 1 else (False,))]

    def _sharing(self, tp_size: int, replicas: int) -> Iterator[tuple[int, int | None]]:
        """Yield the pairs (ZeRO stage, ranks that share states)."""
        inside = None if self.node_size is None else self.node_size // tp_size
        if replicas == 1:  # shares nothing at any stage
            yield min(1, max(self.zero_stages)), None
            return
        for stage in self.zero_stages:
            yield stage, None
            if stage and inside is not None and 1 < inside < replicas and replicas % inside == 0:
                yield stage, inside

    def _grids(self) -> Iterator[tuple[int, int, int]]:
        for tp_size in divisors(self.world_size):
            if tp_size > self.largest_tp:
                continue
            for cp_size in self.cp_sizes:
                if self.world_size // tp_size % cp_size:
                    continue
                for pp_size in divisors(self.world_size // tp_size // cp_size):
                    if pp_size <= max(self.num_layers, 1):
                        yield tp_size, cp_size, pp_size

    def _styles(self, pp_size: int) -> list[tuple[str, int]]:
        if pp_size == 1:
            return [("1f1b", 1)]
        return [(style, chunks) for style, chunks in self.styles if pp_size * chunks <= self.num_layers]

    def _rows(self, share: int) -> list[int]:
        return [rows for rows in self.rows if share % rows == 0]


def divisors(count: int) -> list[int]:
    """Return all divisors of `count` in ascending order."""
    return [size for size in range(1, count + 1) if count % size == 0]


# Number of layouts, best by estimate, whose schedules are simulated.
_SIMULATED = 30


@dataclass(frozen=True)
class Rejection:
    """Layout that was rejected."""

    layout: str  # name of the layout
    reason: str  # why it was rejected, one sentence
    memory: Memory | None = None  # memory of its fullest rank if it does not fit into the device, else None


@dataclass(frozen=True)
class Plan:
    """Result of a search."""

    ranked: Sequence[Prediction]  # layouts that fit, fastest first
    rejected: Sequence[Rejection]  # layouts that were rejected, with reasons

    @property
    def nearest(self) -> Rejection | None:
        """The layout that lacks the least memory; None if every rejected layout has another reason."""
        large = [each for each in self.rejected if each.memory is not None]
        return min(large, key=lambda each: each.memory.needed, default=None)


def search(predictor: Predictor, space: Space, count: int = _SIMULATED) -> Plan:
    """Rank the layouts of `space` as `predictor` predicts them."""
    rejected = [Rejection(grid, reason) for grid, reason in space.left_out()]
    fitting = _fitting(predictor, space.layouts(), rejected)
    # Offload never makes a step faster.
    fitting = fitting or _fitting(predictor, space.offloaded(), rejected)
    fitting.sort(key=_merit)
    best = [predictor.predict(each.layout) for each in fitting[:count]]
    return Plan([*sorted(best, key=_merit), *fitting[count:]], rejected)


def _fitting(predictor: Predictor, layouts: Iterable[Layout], rejected: list[Rejection]) -> list[Prediction]:
    """Return the estimates of the layouts that fit; add the others to `rejected`."""
    fitting: list[Prediction] = []
    for layout in layouts:
        try:
            fitting.append(predictor.predict(layout, exact=False, limit=predictor.device.memory))
        except TooLarge as error:
            rejected.append(Rejection(str(layout), str(error), error.memory))
        except TooManyOperators:
            raise
        except ConfigurationError as error:
            rejected.append(Rejection(str(layout), str(error)))
    return fitting


def _merit(prediction: Prediction) -> tuple:
    """Return the sort key: step time; ties prefer less memory, then the simpler layout."""
    layout: Layout = prediction.layout
    return (
        round(prediction.seconds.total, 9),
        prediction.memory.total,
        layout.tp_size * layout.pp_size,
        layout.num_chunks,
        str(layout),
    )


_TIMEOUT_S = 600.0
_MOST_TOKENS = 4096  # of a micro-batch that is measured on CPUs: larger ones take as long for a token
_LEAST_TOKENS = 1024  # of a sample on a rank: with fewer, keys and values take longer to send than to use


@dataclass(frozen=True)
class Job:
    """Training job to be planned."""

    world_size: int  # number of devices
    global_batch: int  # samples of a step, over all replicas
    length: int  # tokens of a sample
    precision: str  # "fp32", "bf16", "fp16" or "fp8"
    largest_tp: int | None = None  # maximum tensor-parallel size; None for the number of devices of a node
    # maximum context-parallel size; None for as many ranks as have 1024 tokens of a sample each
    largest_cp: int | None = None
    memory: float | None = None  # bytes that a rank may use; None for those of the device
    packing: Packing | None = None  # the documents of packed rows; None for one document in each sample
    quantised: QuantisedBase | None = None  # how the frozen base is stored; None if it is not quantised
    # where layouts may offload to if no other layout fits: "cpu" or a directory; None for nowhere
    offload: str | None = None
    styles: tuple[tuple[str, int], ...] | None = None  # pairs (pipeline schedule, stages per rank); None for all
    zero_stages: tuple[int, ...] | None = None  # ZeRO stages; None for all
    kernels: tuple[str, ...] = ()  # switches of the plugin that all layouts have, such as `tiled_mlp`


@random_numbers_apart()
def plan_for(build: Callable[[], nn.Module], job: Job, device: Device | None) -> tuple[Plan, Device]:
    """Rank the layouts of a job.

    Args:
        build: builds the model; called on the meta device. If this machine is measured, other processes call it too.
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
    """Run `plan_for` in another process: in a running job, the ranks it simulates need a process group."""
    calibration = measured_for(build, job) if device is None else None
    ((plan, _),) = run_on_local_ranks(_search_alone, 1, build, job, device, calibration, timeout_s=_TIMEOUT_S)
    return plan


def plan_for_all_ranks(build: Callable[[], nn.Module], job: Job, device: Device | None) -> list[dict[str, Any]]:
    """Plan on rank 0, and return the ranked layouts on every rank: name, options and predicted seconds of a step."""
    control_group()  # creating it is collective, so do it before rank 0 takes its own path
    rows: list[dict[str, Any]] = []
    problem = None
    if dist.get_rank() == 0:
        try:
            plan = plan_apart(build, job, device)
            rows = [
                {"layout": str(each.layout), "options": each.layout.description(), "predicted": each.seconds.total}
                for each in plan.ranked
            ]
        except Exception as error:  # the other ranks wait for an answer, whatever the error
            problem = f"no layout was planned: {error}"
    rows, problem = all_gather_json((rows, problem), control_group())[0]
    if problem is not None:
        raise ConfigurationError(problem)
    return rows


def bytes_of(text: str) -> float:
    """Return a number of bytes from text, such as 24GiB, 24GB or 24, which is in GiB."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    number = float(match[1]) if match else 0.0
    if not 0 < number < float("inf"):
        raise ConfigurationError(f"'{text}' is no amount of memory, such as 24GiB, 24GB or 24")
    letters = "KMGT"
    power = letters.index(match[2].upper()) + 1 if match[2] else 3
    is_decimal = match[2] and not match[3] and text.strip().upper().endswith("B")
    return number * (1000 if is_decimal else 1024) ** power


def options_for_model(model: nn.Module, rows: int, length: int, memory: str | None) -> dict[str, Any]:
    """Return the options of the fastest planned layout for a model in fp32; all ranks call it.

    Args:
        model: a model that its class builds from its `config`.
        rows: samples of a step of one rank, if all were replicas.
        length: tokens of a sample.
        memory: what a rank may use, as text; None for the memory of the device.
    """
    job = Job(dist.get_world_size(), rows * dist.get_world_size(), length, "fp32")
    job = replace(job, memory=None if memory is None else bytes_of(memory))

    found = plan_for_all_ranks(partial(build_again, type(model), model.config), job, None)
    if not found:
        raise ConfigurationError(
            f"no layout of {job.world_size} ranks fits {type(model).__name__} with {rows} samples of {length} tokens; "
            "use more ranks, or smaller batches"
        )
    # Replicas have the script's own batches, however many there are.
    return {name: value for name, value in found[0]["options"].items() if name != "accum_degree"}


def build_again(model_class: type[nn.Module], config: Any) -> nn.Module:
    """Build a new copy of a model whose weights are initialized lazily, on the ranks that need them."""
    with record_module_init():
        return model_class(config)


def measured_for(build: Callable[[], nn.Module], job: Job) -> Calibration:
    """Measure this machine for every way of sharding the layers that the search of `job` considers."""
    space = _space(ModelMap(build), job, None)
    few, many = _extremes(space)
    if devices_for(1) == CPU:
        many = max(few + 1, min(many, _MOST_TOKENS // job.length))
    cases = [Case(tp, sequence, rows) for tp, sequence in space.cuts() for rows in (few, many)]
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
        sizes = {case.rows for case in calibration.parts}
        device, rows, measured = calibration.device, (min(sizes), max(sizes)), calibration.parts
    if job.precision not in device.flops:
        raise ConfigurationError(
            f"precision='{job.precision}' needs products in 8 bit, which {device.name} has not; use precision='bf16'"
        )
    if job.memory is not None:
        device = replace(device, memory=job.memory)
    quantised = frozenset() if job.quantised is None else job.quantised.names(model.model)
    names = frozenset(name_in_skeleton(name, model.lists) for name in quantised)
    further = {"quantised": job.quantised, "quantised_names": names, "packing": job.packing, "kernels": job.kernels}
    profiler = Profiler(build, job.length, device, job.precision, rows, measured, **further)
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
        tuple(model.ep_sizes),
        node_size=node_size,
        place=job.offload,
        kernels=job.kernels,
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
