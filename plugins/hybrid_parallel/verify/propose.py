"""Search for a plan that trains exactly: train a tiny model with each part of a derived plan, keep what agrees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.local_ranks import run_on_local_ranks
from plugins.hybrid_parallel.distributed.mesh import build_mesh
from plugins.hybrid_parallel.planner.model_flops import FlopCounter
from plugins.hybrid_parallel.setup.model import shard_model
from plugins.hybrid_parallel.shard_report import fake_rank
from plugins.hybrid_parallel.verify.compare import TOLERANCES, Tolerance, compare
from plugins.hybrid_parallel.verify.own_model import OwnModel
from plugins.hybrid_parallel.verify.random_batch import rows_of
from plugins.hybrid_parallel.verify.train import (
    Criterion,
    Subject,
    Trace,
    VerifyCase,
    inputs_of,
    train_on_rank,
    train_reference,
)
from shardformer.distributed.process_groups import world_group
from shardformer.distributed.random import random_numbers_apart
from shardformer.policies.plans.propose import Alternatives, ProposedPlan, candidates
from shardformer.shard_spec import divided_share

RANKS = 2
Run = Callable[..., list[Any]]


def propose_verified(
    subject: Subject,
    rows: int,
    *,
    criterion: Criterion | None = None,
    tolerance: Tolerance = TOLERANCES["fp64"],
    timeout_s: float = 300.0,
    run: Run = run_on_local_ranks,
) -> ProposedPlan:
    """Derive a plan from a model, and keep the parts that train like the unsharded model on two ranks.

    Args:
        subject: the model, small enough to train on CPUs, and its batches.
        rows: samples of a batch.
        criterion: (outputs, batch) -> mean over the samples; None for the model's own loss.
        tolerance: largest differences to the unsharded training.
        timeout_s: time limit for the ranks, in seconds.
        run: `run(function, 2, *arguments, timeout_s=...)` runs a function on two ranks.

    Returns:
        The verified plan; without entries if nothing can be cut exactly.
    """
    model = subject.build()
    batch = subject.batch(model, 0, rows)
    try:
        parts = candidates(model, batch if criterion is None else inputs_of(criterion, model, batch))
    except Exception as error:  # forwards raise arbitrary exception types
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
        raise ConfigurationError(
            f"{subject.name} does not run with derivatives ({reason}); describe its sharding with a TPInfo"
        ) from None
    case = VerifyCase(subject, rows, 1, {}, criterion)
    train_reference(case)
    plans = run(search_on_rank, RANKS, case, parts, tolerance, timeout_s=timeout_s)
    return plans[0]


@random_numbers_apart()
def propose_own_model(
    model_fn: Callable[[], nn.Module],
    batch: Mapping[str, Any],
    *,
    criterion: Criterion | None = None,
    timeout_s: float = 300.0,
) -> ProposedPlan:
    """Derive a verified plan for a user's own module, on two ranks of this machine.

    Args:
        model_fn: function of an importable module that creates the model, which must be small enough for a CPU.
        batch: a global batch: tensors [samples, ...] keyed by argument name of the model's forward.
        criterion: (outputs, batch) -> mean over the samples; None for the model's own loss.
        timeout_s: time limit for the ranks, in seconds.

    Returns:
        The plan: `policy()` is a `custom_policy`, `save(file)` writes JSON that can be edited.
    """
    subject = OwnModel(model_fn, batch, torch.float64)
    return propose_verified(subject, rows_of(batch), criterion=criterion, timeout_s=timeout_s)


def search_on_rank(case: VerifyCase, parts: list[Alternatives], tolerance: Tolerance) -> ProposedPlan:
    """Try the alternatives of each part on this rank; the same on all ranks.

    A part that fails is dropped. If all parts together differ, they are added one by one.
    """
    plain = train_reference(case)

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


def _trains(case: VerifyCase, plan: ProposedPlan, plain: Trace, tolerance: Tolerance) -> bool:
    """Return whether the plan trains exactly, on every rank."""
    options = {"tp_size": RANKS, "dp_size": 1, "custom_policy": plan.policy()}
    try:
        trace = train_on_rank(replace(case, options=options))
        is_equal = compare(plain, [trace], tolerance).first is None
    except Exception:  # a plan that does not fit makes arbitrary operators fail
        is_equal = False
    agreed = torch.tensor(int(is_equal))
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=world_group())
    return bool(agreed)


@dataclass(frozen=True)
class ShareCut:
    """Shares between 0 (every rank has all of it) and 1 (the ranks divide all of it).

    Attributes:
        parameters: share of the elements of all parameters that are sharded.
        flops: share of the FLOPs of matrix products and attention in a forward pass that the ranks divide; None if the
            sharded model does not run without real communication.
    """

    parameters: float
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
        tp_size: number of tensor-parallel ranks.
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
