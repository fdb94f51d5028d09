"""Take the plan away from families that have a policy, propose one, and count the proposals that verify.

    python -m zoo_tests.campaigns.proposed_plans [--only PATTERN] [--output docs/results/proposed_plans.md]
    python -m zoo_tests.campaigns.proposed_plans --ship PATTERN
    python -m zoo_tests.campaigns.proposed_plans --complete PATTERN

One head of each family with a policy or a plan is derived as if nobody knew it. A proposal verifies if a tiny model
trains exactly with the whole plan, and the plan cuts at least one column-row pair. The share of parameters of the
family's own policy stands next to that of the proposal.

`--ship` derives the plans of families that have no other, and writes them to the table of the package. `--complete`
derives what the plans of other families leave whole.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plugins.hybrid_parallel.verify.compare import TOLERANCES
from plugins.hybrid_parallel.verify.image_twin import NoMediaError, image_twin_of
from plugins.hybrid_parallel.verify.propose import propose_verified, share_cut
from plugins.hybrid_parallel.verify.tiny_model import TinyModel, TwinSizes, small_config
from shardformer.policies import families
from shardformer.policies.plans.plan import proposed_plans, region_of
from shardformer.policies.plans.propose import ProposedPlan
from shardformer.policies.registry import policy_for
from shardformer.utils.module_paths import starred
from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.campaigns.census.trained import TOLERANCE
from zoo_tests.harness.ranks import run_on_ranks, stop_pools
from zoo_tests.harness.sound_twin import sound_twin_of

_ROWS, _TIMEOUT_S = 6, 180.0
_TABLE = Path(families.__file__).parent / "proposed.json"
_COMPLETED = _TABLE.with_name("completed.json")
_RANDOM = ("dropout", "draws_per_rank")
_SIZES = TwinSizes(kv_heads=4, is_faithful=False)


@dataclass
class Outcome:
    """What became of a family without its plan.

    Attributes:
        known, proposed: share of the parameters that its own policy divides, and that the proposed plan divides.
        reason: why there is no proposal; empty if there is one.
    """

    known: float = 0.0
    proposed: float = 0.0
    reason: str = ""

    @property
    def verifies(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        return self.reason or f"verified; {self.proposed:.0%} of the parameters, {self.known:.0%} by its policy"


def proposal_of(head: HeadClass) -> Outcome | None:
    """The outcome of a class; None if it has no policy of its own, or does not train plainly."""
    subject = subject_of(head)
    try:
        policy_for(subject[0].build())
    except Exception:  # no subject of this campaign: the census tells why
        return None
    if not _trains_plainly(subject):
        return None
    try:
        plan, twin = proposed(subject), subject[0]
        batch = twin.batch(twin.build(), 0, _ROWS)
        known = share_cut(twin.build, batch).parameters
        found = share_cut(twin.build, batch, custom_policy=plan.policy()).parameters
    except Exception as error:  # arbitrary exception types of arbitrary models
        return Outcome(reason=" ".join(f"{type(error).__name__}: {error}".split())[:160])
    return Outcome(known, found, "" if "rowwise" in plan.styles.values() else "no column-row pair verified")


def subject_of(head: HeadClass) -> tuple[TinyModel, str] | None:
    """The tiny model of a class, and the first precision in which its forward runs; None if there is none."""
    try:
        config = getattr(importlib.import_module(head.module), head.name).config_class()
        twin = TinyModel(head.module, head.name, small_config(config, _SIZES), most_parameters=None)
        for precision, dtype in (("fp64", torch.float64), ("fp32", torch.float32)):
            twin = replace(twin, dtype=dtype)
            if _trains_plainly((twin, precision)):
                return twin, precision
    except Exception:  # arbitrary exception types of arbitrary models
        return None
    return None


def proposed(subject: tuple[TinyModel, str]) -> ProposedPlan:
    """The verified plan of a tiny model."""
    twin, precision = subject
    # Batch norms of a tiny batch amplify what single precision rounds: the census's tolerance.
    tolerance = TOLERANCES[precision] if precision == "fp64" else TOLERANCE
    return propose_verified(twin, _ROWS, tolerance=tolerance, timeout_s=_TIMEOUT_S, run=_run)


def _trains_plainly(subject: tuple[TinyModel, str] | None) -> bool:
    if subject is None:
        return False
    try:
        model = subject[0].build()
        return bool(model(**subject[0].batch(model, 0, _ROWS)).loss.isfinite())
    except Exception:  # arbitrary exception types of arbitrary models
        return False


def _run(function: Any, world_size: int, *arguments: Any, timeout_s: float) -> list[Any]:
    return run_on_ranks(world_size, function, *arguments, timeout_s=timeout_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression on Family/Class")
    parser.add_argument("--ship", help="regular expression on Family/Class: write their plans to the package")
    parser.add_argument("--complete", help="regular expression on Family/Class: write what their plans leave whole")
    parser.add_argument("--output", type=Path, help="Markdown page to write")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    for write, pattern in ((ship, arguments.ship), (complete, arguments.complete)):
        if pattern is not None:
            write(pattern)
            stop_pools()
            return
    outcomes: dict[HeadClass, Outcome] = {}
    for head in head_classes():
        is_known = any(other.family == head.family for other in outcomes)
        if is_known or not re.search(arguments.only, f"{head.family}/{head.name}"):
            continue
        start = time.monotonic()
        outcome = proposal_of(head)
        if outcome is not None:
            outcomes[head] = outcome
            sys.stdout.write(f"{head.family}/{head.name}: {outcome} ({time.monotonic() - start:.0f} s)\n")
            sys.stdout.flush()
    sys.stdout.write(f"{sum(each.verifies for each in outcomes.values())} of {len(outcomes)} proposals verify\n")
    if arguments.output is not None:
        arguments.output.write_text(page(outcomes), encoding="utf-8")
    stop_pools()


def ship(pattern: str) -> None:
    """Derive the plan of each family from its heads that match, and write the table after each family."""
    families: dict[str, list[HeadClass]] = {}
    for head in head_classes():
        if re.search(pattern, f"{head.family}/{head.name}"):
            families.setdefault(head.family, []).append(head)
    table = json.loads(_TABLE.read_text(encoding="utf-8"))
    for family, heads in families.items():
        plans = []
        for head in heads:
            subject = subject_of(head)
            if subject is not None and not _needs_proposal(subject[0].build()):
                continue
            try:
                plans += [] if subject is None else [(subject[0].build().base_model_prefix, proposed(subject))]
            except Exception as error:  # arbitrary exception types of arbitrary models
                sys.stdout.write(f"{family}/{head.name}: {' '.join(str(error).split())[:160]}\n")
        derived = json.loads((of_family(plans) if plans else ProposedPlan()).to_json())
        table[family] = table.get(family, {}) | {name: derived[name] for name in derived if name != "stages"}
        sys.stdout.write(f"{family}: {len(plans)} of {len(heads)} heads run, {len(table[family]['styles'])} styles\n")
        sys.stdout.flush()
        _write(table, _TABLE)


def _write(table: dict[str, Any], file: Path) -> None:
    rows = [f"{json.dumps(name)}: {json.dumps(plan)}" for name, plan in sorted(table.items())]
    file.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def complete(pattern: str) -> None:
    """Write what the plan of each family leaves whole, by the first head that matches and trains.

    The census then has to find the classes of these families exact.
    """
    table = json.loads(_COMPLETED.read_text(encoding="utf-8"))
    done: set[str] = set()
    for head in head_classes():
        if head.family in done or not re.search(pattern, f"{head.family}/{head.name}"):
            continue
        subject = subject_of(head)
        if subject is None:
            continue
        done.add(head.family)
        for each in _seeing(subject):
            try:
                found = completion(each)
            except Exception as error:  # arbitrary exception types of arbitrary models
                sys.stdout.write(f"{head.family}/{head.name}: {' '.join(str(error).split())[:160]}\n")
                continue
            if "rowwise" in found["styles"].values():  # otherwise nothing of size
                table[head.family] = joined(table.get(head.family, found), found)
                _write(table, _COMPLETED)
            sys.stdout.write(f"{head.family}/{head.name}: {len(found['styles'])} styles\n")
            sys.stdout.flush()


def _seeing(subject: tuple[TinyModel, str]) -> list[tuple[TinyModel, str]]:
    """The subject with images, and with sounds, in its batches: a tower that gets none tells nothing."""
    twin, precision = subject
    found, reasons = [], []
    for make in (image_twin_of, sound_twin_of):
        try:
            found.append((make(twin), precision))
        except NoMediaError as error:
            reasons.append(str(error))
    if not found:
        sys.stdout.write(f"{twin.name}, texts alone: {'; '.join(reasons)}\n")
    return found or [subject]


def joined(known: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Two completions of a family: what was derived before a plan had it stays."""
    return {name: known[name] | found[name] for name in found}


def completion(subject: tuple[TinyModel, str]) -> dict[str, Any]:
    """The part of the proposed plan about modules that the model's own plan leaves whole, without the vocabulary."""
    model = subject[0].build()
    policy = policy_for(model)
    policy.set_model(model)
    prefix = model.base_model_prefix
    derived = of_family([(prefix, proposed(subject))])
    known = {path.removeprefix(f"{prefix}.") for path in policy.plan}
    styles = in_pairs({path: style for path, style in derived.styles.items() if path not in known})
    owners = {path.rpartition(".")[0] for path in styles}
    local = {path: list(names) for path, names in derived.local.items() if path in owners}
    return {"styles": styles, "local": local, "classes": classes_at(model, owners)}


def in_pairs(styles: dict[str, str]) -> dict[str, str]:
    """Those of the styles that belong to columns and rows which are both among them, and random numbers of a rank."""
    return {path: style for path, style in styles.items() if region_of(path, styles) != path or style in _RANDOM}


def classes_at(model: nn.Module, paths: set[str]) -> dict[str, list[str]]:
    """The classes of the modules at paths of the base model, with `*` for numbers."""
    prefix, found = model.base_model_prefix, {path: set() for path in sorted(paths)}
    for path, module in model.named_modules():
        at = starred(path).removeprefix(f"{prefix}.")
        if at in found:
            found[at].add(type(module).__name__)
    return {path: sorted(names) for path, names in found.items()}


def _needs_proposal(model: nn.Module) -> bool:
    """Whether the model has no policy but a derived one."""
    try:
        policy = policy_for(model)
    except ValueError:
        return True
    return getattr(policy, "declared", None) in proposed_plans().values()


def of_family(plans: list[tuple[str, ProposedPlan]]) -> ProposedPlan:
    """One plan of the plans of several heads, each with the prefix of its base model: what all agree on in the layers.

    If the heads disagree about a module of the layers, nothing is cut.
    """
    styles: dict[str, str] = {}
    local: dict[str, tuple[str, ...]] = {}
    for prefix, plan in plans:
        for path, style in plan.styles.items():
            if "*" in path and styles.setdefault(path.removeprefix(f"{prefix}."), style) != style:
                return ProposedPlan()
        local |= {path.removeprefix(f"{prefix}."): names for path, names in plan.local.items() if "*" in path}
    cut_vocabulary = all(plan.cut_vocabulary for _, plan in plans)
    whole_logits = any(plan.whole_logits for _, plan in plans)
    return ProposedPlan(styles, local, cut_vocabulary=cut_vocabulary, whole_logits=whole_logits)


def page(outcomes: dict[HeadClass, Outcome]) -> str:
    """The results as Markdown."""
    verified = sum(each.verifies for each in outcomes.values())
    rows = [f"| `{head.name}` | {outcome} |" for head, outcome in outcomes.items()]
    return "\n".join(
        [
            "# Proposed plans of models whose plan is taken away",
            "",
            "Written by `python -m zoo_tests.campaigns.proposed_plans --output docs/results/proposed_plans.md`; do not",
            "edit.",
            "",
            f"**{verified} of {len(outcomes)}** proposals verify ({verified / max(len(outcomes), 1):.0%}): one head of",
            "each family that has a policy or a plan and whose tiny model trains, derived as if nobody knew it.",
            "",
            "| Class | Proposal |",
            "|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
