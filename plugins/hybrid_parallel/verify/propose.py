"""Search for a plan that trains exactly: train a tiny model with each part of a derived plan, and keep what agrees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.local_ranks import run_on_local_ranks
from plugins.hybrid_parallel.verify.compare import TOLERANCES, Tolerance, compare
from plugins.hybrid_parallel.verify.own_model import OwnModel
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
from shardformer.policies.proposed.plan import ProposedPlan
from shardformer.policies.proposed.propose import Alternatives, candidates

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

    Raises:
        ConfigurationError: the model does not run, or does not train unsharded.
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

    Raises:
        ConfigurationError: the model does not run, or does not train unsharded.
    """
    rows = next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()), 0)
    if rows == 0:
        raise ConfigurationError("the batch holds no samples; give a mapping with tensors [samples, ...]")
    subject = OwnModel(model_fn, batch, torch.float64)
    return propose_verified(subject, rows, criterion=criterion, timeout_s=timeout_s)


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
