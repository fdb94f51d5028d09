"""`booster verify`: check that a model trains the same under a layout as unsharded, or propose a plan that does."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from booster.cli.command_parser import CommandParser, prints_json, write_json
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.cli.arguments import (
    add_layout,
    count,
    layout_options,
    model_of,
    refuse_bad_places,
    refuse_without_pipeline,
)
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.verify.compare import TOLERANCES, allowed
from plugins.hybrid_parallel.verify.compare import to_text as verdict_to_text
from plugins.hybrid_parallel.verify.layout_check import CheckedModel, check_layout
from plugins.hybrid_parallel.verify.propose import RANKS, ShareCut, propose_verified, share_cut
from plugins.hybrid_parallel.verify.random_batch import distance_from_wave
from plugins.hybrid_parallel.verify.train import Criterion, VerifyCase
from plugins.hybrid_parallel.verify.verify import (
    Verification,
    plain_training,
    refuse_without_loss,
    tiny_model_of,
    verify,
)
from shardformer.policies.plans.execution import execution_order
from shardformer.policies.plans.propose import ProposedPlan
from shardformer.utils.module_paths import text_config

_ROWS = 7  # odd, so that no size of the model divides it
_SPLITS = "pipeline: 2 stages train the same"
_DIVIDES = "sequence parallelism: slices of the sequence between the regions train the same"


@dataclass(frozen=True)
class Proposal:
    """A proposed plan."""

    plan: ProposedPlan  # the plan, of which each part trained the tiny model exactly
    share: ShareCut  # what it divides of the tiny model
    pipeline: str  # a sentence about whether the layers can be split into two stages
    sequence: str  # a sentence about whether their sequences can be sliced between tensor-parallel regions

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
    """Derive a plan from a tiny model of the class, which must train with a loss; verify it on two ranks."""
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
        recorded = replace(plan, execution={"*": order})
        if not trains(recorded, **stages):
            plan, problem = recorded, ""
    pipeline = f"pipeline: no ({problem}); use pp_size=1" if problem else _SPLITS
    divided = replace(plan, splits_sequence=True)
    problem = trains(divided, tp_size=RANKS, enable_sequence_parallelism=True)
    sequence = f"sequence parallelism: no ({problem.partition(';')[0]})" if problem else _DIVIDES
    return Proposal(plan if problem else divided, share, pipeline, sequence)


def plan_of_file(file: str) -> ProposedPlan:
    """Read a plan."""
    try:
        return ProposedPlan.load(file)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


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


_DIFFERENT = 1
_MOST_PROCESSES = 16  # ranks that are started on this machine


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Returns:
        0 if both trainings are equal, 1 if they differ or the sharded one fails.
    """
    options = parser().parse_args(arguments)
    refuse_without_pipeline(options.pp, options.schedule, options.chunks)
    plugin_options = {**layout_options(options), "zero_stage": options.zero}
    refuse_bad_places(options.json)
    output = options.output
    if options.propose and options.plan is not None:
        raise ConfigurationError(f"--propose derives a plan, and --plan {options.plan} gives one; use one of them")
    if output is not None and not options.propose:
        raise ConfigurationError(f"--output {output} needs a plan to write; add --propose")
    if output is not None and (Path(output).is_dir() or not Path(output).absolute().parent.is_dir()):
        raise ConfigurationError(f"--output {output} cannot be written; name a file in an existing folder")
    import transformers

    transformers.logging.set_verbosity_error()
    config, model_class = model_of(options.model, options.head, options.trust_remote_code)
    if model_class is None:
        raise ConfigurationError(f"{options.model} does not say what it is for; name a head with --head, as CausalLM")
    criterion = distance_from_wave if options.criterion else None
    proposal = None
    if options.propose:
        proposal = propose(config, model_class, options.timeout, criterion)
        show(proposal, options.output, prints_json(options.json))
        plugin_options["tp_size"] = max(options.tp, RANKS)
        plugin_options["custom_policy"] = proposal.plan.policy()
    elif options.plan is not None:
        plugin_options["custom_policy"] = plan_of_file(options.plan).policy()
    world_size = options.tp * options.pp * options.cp * plugin_options["dp_size"]
    if world_size > _MOST_PROCESSES:
        return _without_ranks(config, model_class, plugin_options, world_size, options.json)
    found = verify(config, model_class, plugin_options, options.precision, options.steps, options.timeout, criterion)
    if not prints_json(options.json):
        sys.stdout.write(to_text(found))
    if options.json is not None:
        write_json(as_json(found) | ({} if proposal is None else proposal.as_json()), options.json)
    return 0 if found.verdict.first is None else _DIFFERENT


def _without_ranks(
    config: Any, model_class: type[nn.Module], plugin_options: dict[str, Any], world_size: int, path: Any
) -> int:
    """Check a layout with more ranks than this machine can start, axis by axis."""
    with torch.device("meta"):
        model = model_class(config)
    report = check_layout(CheckedModel(model), plugin_options, world_size)
    if not prints_json(path):
        sys.stdout.write("\n".join(report.lines()) + "\n")
    if path is not None:
        write_json({"model": model_class.__name__, "ranks": world_size, **asdict(report)}, path)
    return _DIFFERENT if report.findings else 0


def to_text(found: Verification) -> str:
    """Format what was compared, and "equal" or the first difference, as text."""
    trial = found.trial
    text = text_config(trial.tiny_model.config)
    sizes = ("num_hidden_layers", "layers"), ("num_attention_heads", "heads"), ("hidden_size", "hidden")
    words = [f"{getattr(text, name)} {word}" for name, word in sizes if isinstance(getattr(text, name, None), int)]
    config = HybridParallelConfig.from_options(**trial.options)
    layout = config.layout(config.parallel.dp_size or 1)
    lines = [
        f"{trial.tiny_model.name}, {layout}, {found.world_size} ranks, {found.precision}",
        f"tiny model: {', '.join([*words, f'{found.num_parameters:,} parameters'])}; {trial.steps} steps of "
        f"{trial.rows} samples",
        *verdict_to_text(found.verdict, found.precision),
    ]
    if found.lines_not_run:
        lines += ["not shown, as the batch does not run these lines:", *(f"  {each}" for each in found.lines_not_run)]
    return "\n".join(lines) + "\n"


def as_json(found: Verification) -> dict[str, Any]:
    """Convert the result to JSON; an infinite difference becomes null."""
    first = found.verdict.first
    return {
        "model": found.trial.tiny_model.name,
        "options": {name: value for name, value in found.trial.options.items() if name != "custom_policy"},
        "precision": found.precision,
        "ranks": found.world_size,
        "steps": found.trial.steps,
        "parameters": found.num_parameters,
        "equal": first is None,
        "first_difference": None if first is None else {**asdict(first), "value": _finite(first.value)},
        "compared": [
            {**asdict(worst), "value": _finite(worst.value), "allowed": allowed(worst, found.precision)}
            for worst in found.verdict.worst
        ],
        "not_reached": found.verdict.untrained,
        "lines_not_run": found.lines_not_run,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def parser() -> CommandParser:
    """Return the parser of the command line."""
    command = CommandParser(
        prog="booster verify",
        description="Train a tiny model of the same class sharded and unsharded, on CPU ranks of this machine, and "
        "print where they differ first, or that they are equal.",
        examples=(
            "booster verify config.json --tp 2 --pp 2",
            "booster verify config.json --head SequenceClassification --tp 2 --dp 2 --sp",
            "booster verify model --trust-remote-code --propose --output plan.json",
            "booster verify config.json --head BertModel --tp 2 --criterion",
            "booster verify config.json --pp 2 --schedule zbv --microbatches 4 --json result.json",
        ),
    )
    command.add_argument("model", help="a model's directory, its config.json, or a name that is in the cache")
    command.add_argument("--head", help="the model's class, such as BertForMaskedLM, or what it is for, as MaskedLM")
    add_layout(command)
    command.add_argument(
        "--criterion", action="store_true", help="train its outputs towards fixed values, for a class without a loss"
    )
    command.add_argument("--propose", action="store_true", help="derive a tensor-parallel plan first, and verify it")
    command.add_argument("--output", metavar="FILE", help="write the proposed plan to a JSON file, for --plan")
    command.add_argument("--plan", metavar="FILE", help="verify this plan, such as an edited proposal")
    command.add_argument(
        "--trust-remote-code", action="store_true", help="run the code in the model's directory, which can do anything"
    )
    command.add_argument("--zero", type=int, default=1, help="ZeRO stage (1)")
    command.add_argument(
        "--precision", choices=list(TOLERANCES), help="of both trainings (fp64, or fp32 where it must)"
    )
    command.add_argument("--steps", type=count, default=3, help="of the optimizer (3)")
    command.add_argument("--timeout", type=count, default=300, help="seconds that the ranks may take (300)")
    command.add_json()
    return command
