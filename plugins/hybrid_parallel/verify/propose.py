"""Verification of a user's own model, and the search for a plan that trains it exactly.

The search trains a tiny model with each part of a derived plan, and keeps what agrees with plain training.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn

from booster.errors import ConfigurationError, VerificationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.local_ranks import run_on_local_ranks
from plugins.hybrid_parallel.distributed.mesh import build_mesh, control_group
from plugins.hybrid_parallel.planner.op_recorder import FlopCounter
from plugins.hybrid_parallel.setup.model import shard_model
from plugins.hybrid_parallel.shard_report import fake_rank
from plugins.hybrid_parallel.verify import train
from plugins.hybrid_parallel.verify.compare import TOLERANCES, Tolerance, Verdict, compare, to_text
from plugins.hybrid_parallel.verify.module_outputs import Output
from plugins.hybrid_parallel.verify.random_batch import cast, rows_of
from plugins.hybrid_parallel.verify.tiny_model import without_dropout
from shardformer.distributed.process_groups import all_gather_json, world_group
from shardformer.distributed.random import random_numbers_apart
from shardformer.policies.plans.propose import Alternatives, ProposedPlan, candidates
from shardformer.shard_spec import Part, ShardSpec, divided_share

_SEED = 1
_CLASSES = {each.__name__: each for each in (train.Trace, train.RecordedStep, Output, ShardSpec, Part)}


def trace_to_json(trace: train.Trace) -> str:
    """Write what a rank has recorded as JSON."""
    return json.dumps(trace, default=_as_object)


def trace_from_json(text: str) -> train.Trace:
    """Read a trace; the inverse of `trace_to_json`."""
    return json.loads(text, object_hook=_from_object)


def _as_object(value: Any) -> dict[str, Any]:
    if isinstance(value, numpy.ndarray):
        data = base64.b64encode(numpy.ascontiguousarray(value).tobytes()).decode()
        return {"$array": data, "dtype": value.dtype.str, "shape": value.shape}
    return {"$class": type(value).__name__} | {each.name: getattr(value, each.name) for each in fields(value)}


def _from_object(parts: dict[str, Any]) -> Any:
    if "$array" in parts:
        return numpy.frombuffer(base64.b64decode(parts["$array"]), parts["dtype"]).reshape(parts["shape"]).copy()
    kind = _CLASSES.get(parts.pop("$class", None))
    if kind is Output:
        parts["parts"] = {int(index): array for index, array in parts["parts"].items()}
    elif kind is ShardSpec:
        parts |= {name: tuple(parts[name]) for name in ("full_shape", "parts")}
    return parts if kind is None else kind(**parts)


@dataclass(frozen=True)
class OwnModel:
    """User's model and batch, from which every process builds identical copies."""

    model_fn: Callable[[], nn.Module]  # builds the model
    given: Mapping[str, Any]  # the global batch of every step
    dtype: torch.dtype  # dtype of the weights and of floating-point tensors in the batch

    @property
    def name(self) -> str:
        """Name of the model for messages."""
        return getattr(self.model_fn, "__qualname__", type(self.model_fn).__name__)

    def build(self) -> nn.Module:
        """Build the model in training mode, on the CPU, without dropout."""
        with random_numbers_apart(_SEED):
            return without_dropout(self.model_fn().to(device="cpu", dtype=self.dtype).train())

    def batch(self, model: nn.Module, step: int, rows: int) -> dict[str, Any]:
        """Return the user's batch, the same in every step."""
        return cast(self.given, self.dtype)


@dataclass(frozen=True)
class Report:
    """Result of a verification; `str` formats it as text."""

    title: str  # the model and its layout
    precision: str  # precision of both trainings
    verdict: Verdict  # verdict of the comparison

    @property
    def equal(self) -> bool:
        """Whether all losses, gradients and weights of both trainings agree."""
        return self.verdict.first is None

    def __str__(self) -> str:
        return "\n".join([self.title, *to_text(self.verdict, self.precision)])


@random_numbers_apart(_SEED)
def verify_own_model(
    model_fn: Callable[[], nn.Module],
    batch: Mapping[str, Any],
    config: HybridParallelConfig,
    *,
    criterion: Callable[[Any, Any], Any] | None = None,
    steps: int = 2,
    precision: str = "fp64",
    timeout_s: float = 300.0,
) -> Report:
    """Implement `booster.verify`; see there."""
    if precision not in TOLERANCES:
        raise ConfigurationError(f"precision='{precision}' cannot be compared in; use {' or '.join(TOLERANCES)}")
    rows = rows_of(batch)
    options, parallel = config.options() | {"precision": "fp32"}, config.parallel
    subject = OwnModel(model_fn, batch, torch.float64 if precision == "fp64" else torch.float32)
    in_a_job = dist.is_initialized() and dist.get_world_size() > 1
    world_size = dist.get_world_size() if in_a_job else parallel.tp_size * parallel.pp_size * parallel.cp_size
    if not in_a_job:
        world_size *= parallel.dp_size or parallel.ep_size
        options["dp_size"] = parallel.dp_size or parallel.ep_size
    trial = train.VerifyCase(subject, rows, steps, options, criterion)
    plain = train.train_reference(trial)
    if in_a_job:
        found = all_gather_json(trace_to_json(train.train_on_rank(trial)), control_group())
        ranks = [trace_from_json(each) for each in found]
    else:
        ranks = run_on_local_ranks(train.train_on_rank, world_size, trial, timeout_s=timeout_s)
    sizes = " x ".join(
        f"{axis} {size}" for axis in ("tp", "pp", "cp") if (size := getattr(parallel, f"{axis}_size")) > 1
    )
    title = (
        f"{subject.name}, {sizes or 'data parallel'}, {world_size} ranks, {precision}, {steps} steps of {rows} samples"
    )
    report = Report(title, precision, compare(plain, ranks, TOLERANCES[precision]))
    if not report.equal:
        raise VerificationError(str(report))
    return report


RANKS = 2
Run = Callable[..., list[Any]]


def propose_verified(
    subject: train.Subject,
    rows: int,
    *,
    criterion: train.Criterion | None = None,
    tolerance: Tolerance = TOLERANCES["fp64"],
    timeout_s: float = 300.0,
    run: Run = run_on_local_ranks,
) -> ProposedPlan:
    """Derive a plan from a model, and keep the parts that train like the unsharded model on two ranks.

    Args:
        subject: the model, small enough to train on CPUs, and its batches.
        criterion: (outputs, batch) -> mean over the samples; None for the model's own loss.
        run: `run(function, 2, *arguments, timeout_s=...)` runs a function on two ranks.

    Returns:
        The verified plan; without entries if nothing can be cut exactly.
    """
    model = subject.build()
    batch = subject.batch(model, 0, rows)
    try:
        parts = candidates(model, batch if criterion is None else train.inputs_of(criterion, model, batch))
    except Exception as error:  # forwards raise arbitrary exception types
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
        raise ConfigurationError(
            f"{subject.name} does not run with derivatives ({reason}); describe its sharding with a TPInfo"
        ) from None
    case = train.VerifyCase(subject, rows, 1, {}, criterion)
    train.train_reference(case)
    plans = run(search_on_rank, RANKS, case, parts, tolerance, timeout_s=timeout_s)
    return plans[0]


@random_numbers_apart()
def propose_own_model(
    model_fn: Callable[[], nn.Module],
    batch: Mapping[str, Any],
    *,
    criterion: train.Criterion | None = None,
    timeout_s: float = 300.0,
) -> ProposedPlan:
    """Derive a verified plan for a user's own module, on two ranks of this machine.

    Args:
        model_fn: function of an importable module that creates the model, which must be small enough for a CPU.
        batch: a global batch: tensors [samples, ...] keyed by argument name of the model's forward.
        criterion: (outputs, batch) -> mean over the samples; None for the model's own loss.

    Returns:
        The plan: `policy()` is a `custom_policy`, `save(file)` writes JSON that can be edited.
    """
    subject = OwnModel(model_fn, batch, torch.float64)
    return propose_verified(subject, rows_of(batch), criterion=criterion, timeout_s=timeout_s)


def search_on_rank(case: train.VerifyCase, parts: list[Alternatives], tolerance: Tolerance) -> ProposedPlan:
    """Drop parts that fail on this rank, as on all; add the others one by one if together they differ."""
    plain = train.train_reference(case)

    def trains(plan: ProposedPlan) -> bool:
        return _trains(case, plan, plain, tolerance)

    chosen = [found for part in parts if (found := next(filter(trains, part), None)) is not None]
    whole = ProposedPlan()
    for part in chosen:
        whole = whole.joined(part)
    if len(chosen) <= 1 or trains(whole):
        return whole
    whole = ProposedPlan()
    for part in chosen:
        joined = whole.joined(part)
        whole = joined if trains(joined) else whole
    return whole


def _trains(case: train.VerifyCase, plan: ProposedPlan, plain: train.Trace, tolerance: Tolerance) -> bool:
    """Return whether the plan trains exactly, on every rank."""
    options = {"tp_size": RANKS, "dp_size": 1, "custom_policy": plan.policy()}
    try:
        trace = train.train_on_rank(replace(case, options=options))
        is_equal = compare(plain, [trace], tolerance).first is None
    except Exception:  # a plan that does not fit makes arbitrary operators fail
        is_equal = False
    agreed = torch.tensor(int(is_equal))
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=world_group())
    return bool(agreed)


@dataclass(frozen=True)
class ShareCut:
    """Shares between 0 (every rank has all of it) and 1 (the ranks divide all of it)."""

    parameters: float  # share of the elements of all parameters that are sharded
    # share of the FLOPs of matrix products and attention in a forward pass that the ranks divide; None if the sharded
    # model does not run without real communication
    flops: float | None

    def __str__(self) -> str:
        flops = "unknown" if self.flops is None else f"{self.flops:.0%}"
        return f"{self.parameters:.0%} of the parameters, {flops} of the FLOPs"


def share_cut(
    build: Callable[[], nn.Module], batch: Mapping[str, Any] | None, tp_size: int = 2, **options: Any
) -> ShareCut:
    """Measure the shares that `tp_size` ranks divide.

    Args:
        build: builds the whole model; called twice.
        batch: inputs of a forward pass; None if the FLOPs are not asked for.
        options: further options of `HybridParallelPlugin`, such as `custom_policy`.

    Raises:
        ConfigurationError: the model cannot be sharded, or process groups already exist.
    """
    whole_flops = _flops(build(), batch)
    config = HybridParallelConfig.from_options(tp_size=tp_size, dp_size=1, **options)
    with fake_rank(0, tp_size):
        mesh = build_mesh(*config.parallel.mesh_shape(tp_size))
        model = build()
        shard_model(model, config, mesh)
        share, local_flops = divided_share(model.parameters()), _flops(model, batch)
    return ShareCut(share, _divided(whole_flops, local_flops, tp_size))


def _divided(whole: float | None, local: float | None, tp_size: int) -> float | None:
    """Solve local = whole * (1 - share + share / tp_size) for the share."""
    if not whole or local is None or tp_size == 1:
        return None
    share = (1 - local / whole) * tp_size / (tp_size - 1)
    return min(max(share, 0.0), 1.0)


def _flops(model: nn.Module, batch: Mapping[str, Any] | None) -> float | None:
    """Count the FLOPs of a forward pass; None if it fails, as values are arbitrary without communication."""
    if batch is None:
        return None
    counter = FlopCounter()
    try:
        with torch.no_grad(), counter:
            model(**batch)
    except Exception:  # arbitrary exception types of arbitrary models
        return None
    return counter.flops
