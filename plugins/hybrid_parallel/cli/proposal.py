"""`booster verify --propose`: a plan for a model that has none, and whether a tiny model trains the same with it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.verify.compare import TOLERANCES
from plugins.hybrid_parallel.verify.propose import RANKS, propose_verified
from plugins.hybrid_parallel.verify.share_cut import ShareCut, share_cut
from plugins.hybrid_parallel.verify.train import Criterion, VerifyCase
from plugins.hybrid_parallel.verify.verify import (
    Verification,
    plain_training,
    refuse_without_loss,
    tiny_model_of,
    verify,
)
from shardformer.policies.proposed.execution import execution_order
from shardformer.policies.proposed.plan import ProposedPlan

_ROWS = 7  # odd, so that no size of the model divides it
_SPLITS = "pipeline: 2 stages train the same"
_DIVIDES = "sequence parallelism: slices of the sequence between the regions train the same"


@dataclass(frozen=True)
class Proposal:
    """A proposed plan.

    Attributes:
        plan: the plan, of which each part trained the tiny model exactly.
        share: what it divides of the tiny model.
        pipeline: a sentence about whether the layers can be split into two stages.
        sequence: a sentence about whether their sequences can be sliced between tensor-parallel regions.
    """

    plan: ProposedPlan
    share: ShareCut
    pipeline: str
    sequence: str

    def as_json(self) -> dict[str, Any]:
        """Return the keys that the proposal adds to the document of `booster verify`."""
        return {
            "plan": json.loads(self.plan.to_json()),
            "parameters_cut": self.share.parameters,
            "flops_cut": self.share.flops,
            "pipeline": self.pipeline,
            "sequence": self.sequence,
        }

    def __str__(self) -> str:
        share = f"{RANKS} tensor-parallel ranks divide {self.share}"
        return f"{self.plan.to_json()}{share}\n{self.pipeline}\n{self.sequence}\n"


def propose(
    config: Any, model_class: type[nn.Module], timeout_s: float, criterion: Criterion | None = None
) -> Proposal:
    """Derive a plan from a tiny model of the class, and verify its parts on two ranks.

    Args:
        config: configuration of the full-size model.
        model_class: class of the model.
        timeout_s: time limit for the ranks, in seconds.
        criterion: see `verify`.

    Raises:
        ConfigurationError: the class has no loss, or no tiny model of it trains.
    """
    refuse_without_loss(model_class, criterion)
    trial = VerifyCase(tiny_model_of(config, model_class, RANKS, RANKS, criterion), _ROWS, 1, {}, criterion)
    trial, precision, _ = plain_training(trial, None)
    tiny_model = trial.tiny_model
    tolerance = TOLERANCES[precision]
    plan = propose_verified(tiny_model, _ROWS, criterion=criterion, tolerance=tolerance, timeout_s=timeout_s)
    batch = tiny_model.batch(tiny_model.build(), 0, _ROWS)
    share = share_cut(tiny_model.build, batch, RANKS, custom_policy=plan.policy())

    def trains(plan: ProposedPlan, **options: Any) -> str:
        return _trains(config, model_class, options | {"custom_policy": plan.policy()}, timeout_s, criterion)

    stages = {"pp_size": RANKS, "num_microbatches": 1}
    problem = trains(plan, **stages)
    if problem and (order := execution_order(tiny_model.build(), batch)) is not None:
        recorded = replace(plan, stages={"*": order})
        if not trains(recorded, **stages):
            plan, problem = recorded, ""
    pipeline = f"pipeline: no ({problem}); use pp_size=1" if problem else _SPLITS
    divided = replace(plan, splits_sequence=True)
    problem = trains(divided, tp_size=RANKS, enable_sequence_parallelism=True)
    sequence = f"sequence parallelism: no ({problem.partition(';')[0]})" if problem else _DIVIDES
    return Proposal(plan if problem else divided, share, pipeline, sequence)


def plan_of_file(file: str) -> ProposedPlan:
    """Read a plan.

    Raises:
        ConfigurationError: the file holds no plan.
    """
    try:
        return ProposedPlan.load(file)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def refuse_bad_output(output: str | None) -> None:
    """Check that the plan can be written, before anything is trained.

    Raises:
        ConfigurationError: the folder does not exist, or `output` is a folder.
    """
    if output is not None and (Path(output).is_dir() or not Path(output).absolute().parent.is_dir()):
        raise ConfigurationError(f"--output {output} cannot be written; name a file in an existing folder")


def show(proposal: Proposal, output: str | None, quiet: bool) -> None:
    """Print the proposal unless `quiet`, and write its plan to `output` if that is a file's name."""
    if not quiet:
        sys.stdout.write(str(proposal))
    if output is not None:
        proposal.plan.save(output)
        (sys.stderr if quiet else sys.stdout).write(f"plan written to {output}; edit it, and verify it with --plan\n")


def _trains(
    config: Any,
    model_class: type[nn.Module],
    options: dict[str, Any],
    timeout_s: float,
    criterion: Criterion | None,
) -> str:
    """Train the tiny model on two ranks; return what differs or is refused, empty if it trains the same."""
    sizes = {"tp_size": 1, "pp_size": 1, "dp_size": 1}
    try:
        found: Verification = verify(
            config, model_class, sizes | options, steps=1, timeout_s=timeout_s, criterion=criterion
        )
    except ConfigurationError as error:
        return str(error)
    first = found.verdict.first
    return "" if first is None else first.text
