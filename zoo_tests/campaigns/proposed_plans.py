"""Take the plan away from families that have a policy, propose one, and count the proposals that verify.

    python -m zoo_tests.campaigns.proposed_plans [--only PATTERN] [--output docs/results/proposed_plans.md]

One head of each family with a policy or a plan is derived as if nobody knew it. A proposal verifies if a tiny model
trains exactly with the whole plan, and the plan cuts at least one column-row pair. The share of parameters of the
family's own policy stands next to that of the proposal.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from plugins.hybrid_parallel.verify.compare import TOLERANCES
from plugins.hybrid_parallel.verify.propose import propose_verified
from plugins.hybrid_parallel.verify.share_cut import share_cut
from plugins.hybrid_parallel.verify.tiny_model import TinyModel, TwinSizes, small_config
from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.harness.ranks import run_on_ranks, stop_pools

_ROWS, _TIMEOUT_S = 6, 180.0
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
    from shardformer.policies.registry import policy_for

    try:
        config = getattr(importlib.import_module(head.module), head.name).config_class()
        twin = TinyModel(head.module, head.name, small_config(config, _SIZES), torch.float64)
        model = twin.build()
        policy_for(model)
        batch = twin.batch(model, 0, _ROWS)
        precision = "fp64"
        try:
            loss = model(**batch).loss
        except Exception:
            twin, precision = replace(twin, dtype=torch.float32), "fp32"
            loss = twin.build()(**twin.batch(model, 0, _ROWS)).loss
        if not loss.isfinite():
            return None
    except Exception:  # no subject of this campaign: the census tells why
        return None
    try:
        plan = propose_verified(twin, _ROWS, tolerance=TOLERANCES[precision], timeout_s=_TIMEOUT_S, run=_run)
        own = twin.batch(twin.build(), 0, _ROWS)
        known = share_cut(twin.build, own).parameters
        proposed = share_cut(twin.build, own, custom_policy=plan.policy()).parameters
    except Exception as error:
        return Outcome(reason=" ".join(f"{type(error).__name__}: {error}".split())[:160])
    is_cut = "rowwise" in plan.styles.values()
    return Outcome(known, proposed, "" if is_cut else "no column-row pair verified")


def _run(function: Any, world_size: int, *arguments: Any, timeout_s: float) -> list[Any]:
    return run_on_ranks(world_size, function, *arguments, timeout_s=timeout_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression on Family/Class")
    parser.add_argument("--output", type=Path, help="Markdown page to write")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
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
