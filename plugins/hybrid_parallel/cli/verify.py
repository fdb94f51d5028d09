"""`booster verify`: check that a model trains the same under a layout as unsharded, or find the first difference."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from booster.cli.command_parser import CommandParser, prints_json, write_json
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.cli.argument_checks import refuse_bad_places, refuse_without_pipeline
from plugins.hybrid_parallel.cli.arguments import add_layout, count, layout_options
from plugins.hybrid_parallel.cli.models import model_of
from plugins.hybrid_parallel.cli.proposal import plan_of_file, propose, refuse_bad_output, show
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.verify.compare import TOLERANCES
from plugins.hybrid_parallel.verify.layout_check import CheckedModel, check_layout
from plugins.hybrid_parallel.verify.output_criterion import distance_from_wave
from plugins.hybrid_parallel.verify.propose import RANKS
from plugins.hybrid_parallel.verify.report import allowed
from plugins.hybrid_parallel.verify.report import to_text as verdict_to_text
from plugins.hybrid_parallel.verify.verify import Verification, verify

_DIFFERENT = 1
_MOST_PROCESSES = 16  # ranks that are started on this machine


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Returns:
        0 if both trainings are equal, 1 if they differ or the sharded one fails.

    Raises:
        ConfigurationError: an option is invalid, no tiny model can be made, or the model cannot be sharded.
    """
    options = parser().parse_args(arguments)
    refuse_without_pipeline(options.pp, options.schedule, options.chunks)
    plugin_options = {**layout_options(options), "zero_stage": options.zero}
    refuse_bad_places(options.json)
    _refuse_mixed_plans(options)
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
        return _check_without_ranks(config, model_class, plugin_options, world_size, options.json)
    found = verify(config, model_class, plugin_options, options.precision, options.steps, options.timeout, criterion)
    if not prints_json(options.json):
        sys.stdout.write(to_text(found))
    if options.json is not None:
        write_json(as_json(found) | ({} if proposal is None else proposal.as_json()), options.json)
    return 0 if found.verdict.first is None else _DIFFERENT


def _check_without_ranks(
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
    text = trial.tiny_model.config.get_text_config()
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
    }


def _refuse_mixed_plans(options: argparse.Namespace) -> None:
    """Check the options about plans.

    Raises:
        ConfigurationError: they exclude each other.
    """
    if options.propose and options.plan is not None:
        raise ConfigurationError(f"--propose derives a plan, and --plan {options.plan} gives one; use one of them")
    if options.output is not None and not options.propose:
        raise ConfigurationError(f"--output {options.output} needs a plan to write; add --propose")
    refuse_bad_output(options.output)


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
