"""Search for a plan that trains exactly: train a tiny model with each part of a derived plan, and keep what agrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.local_ranks import run_on_local_ranks
from plugins.hybrid_parallel.verify.compare import TOLERANCES, Tolerance, compare
from plugins.hybrid_parallel.verify.train import Subject, Trace, VerifyCase, train_on_rank, train_reference
from shardformer.policies.proposed.plan import ProposedPlan
from shardformer.policies.proposed.propose import Alternatives, candidates

RANKS = 2
Run = Callable[..., list[Any]]


def propose_verified(
    subject: Subject,
    rows: int,
    *,
    tolerance: Tolerance = TOLERANCES["fp64"],
    timeout_s: float = 300.0,
    run: Run = run_on_local_ranks,
) -> ProposedPlan:
    """Derive a plan from a model, and keep the parts that train like the unsharded model on two ranks.

    Args:
        subject: the model, small enough to train on CPUs, and its batches.
        rows: samples of a batch.
        tolerance: largest differences to the unsharded training.
        timeout_s: time limit for the ranks, in seconds.
        run: `run(function, 2, *arguments, timeout_s=...)` runs a function on two ranks.

    Returns:
        The verified plan; without entries if nothing can be cut exactly.

    Raises:
        ConfigurationError: the model does not run, or does not train unsharded.
    """
    model = subject.build()
    try:
        parts = candidates(model, subject.batch(model, 0, rows))
    except Exception as error:  # forwards raise arbitrary exception types
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
        raise ConfigurationError(
            f"{subject.name} does not run with derivatives ({reason}); describe its sharding with a TPInfo"
        ) from None
    train_reference(VerifyCase(subject, rows, 1, {}))
    plans = run(search_on_rank, RANKS, subject, rows, parts, tolerance, timeout_s=timeout_s)
    return plans[0]


def search_on_rank(subject: Subject, rows: int, parts: list[Alternatives], tolerance: Tolerance) -> ProposedPlan:
    """Try the alternatives of each part on this rank; the same on all ranks.

    A part that fails is dropped. If all parts together differ, they are added one by one.
    """
    plain = train_reference(VerifyCase(subject, rows, 1, {}))

    def trains(plan: ProposedPlan) -> bool:
        return _trains(subject, rows, plan, plain, tolerance)

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


def _trains(subject: Subject, rows: int, plan: ProposedPlan, plain: Trace, tolerance: Tolerance) -> bool:
    """Return whether the plan trains exactly, on every rank."""
    options = {"tp_size": RANKS, "dp_size": 1, "custom_policy": plan.policy()}
    try:
        trace = train_on_rank(VerifyCase(subject, rows, 1, options))
        is_equal = compare(plain, [trace], tolerance).first is None
    except Exception:  # a plan that does not fit makes arbitrary operators fail
        is_equal = False
    agreed = torch.tensor(int(is_equal))
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return bool(agreed)
