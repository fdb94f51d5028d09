"""Derive where the families of `proposed.json` can be split into pipeline stages, and keep what trains exactly.

    python -m zoo_tests.campaigns.proposed_stages PATTERN [--log FILE]

PATTERN is a regular expression on Family/Class. The order in which the parts of a tiny model of each class run is
recorded. A class gets stages if the tiny model trains exactly in two of them, cut in the middle and at three quarters
of its layers. If micro-batches of the loss that its forward computes cannot be put together as they are, it is taken as
the usual loss of its kind, as a mean over its labels or as a sum, if the model trains exactly with that one.
`--log` writes what is found to another file than the package's table, one class a line.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardformer.loss.heads import LOSSES, USUAL, USUAL_HEAD_LOSSES, head_loss_of_kind, matching_key
from shardformer.policies import families
from shardformer.policies.plans.execution import execution_order
from shardformer.policies.plans.policy import PlanPolicy
from shardformer.policies.plans.propose import ProposedPlan
from shardformer.policies.registry import head_loss_of
from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.campaigns.census.trained import plain_run, sharded_run
from zoo_tests.campaigns.census.verdict import EXACT
from zoo_tests.harness.ranks import stop_pools

_TABLE = Path(families.__file__).with_name("proposed.json")
_ROWS = 6
OWN_LOSS = "computes a loss of its own"  # of which micro-batches cannot be put together


def stages_of(head: HeadClass) -> dict[str, Any] | str:
    """The stages of a class, and what loss it has, in the terms of JSON; or why it has no stages."""
    plain = plain_run(head)
    if isinstance(plain, str):
        return f"plain: {plain}"
    twin = plain.case.tiny_model
    model = twin.build()
    try:
        order = execution_order(model, twin.batch(model, 0, _ROWS))
        layout = None if order is None else order.layout(model)
    except Exception as error:  # arbitrary exception types of arbitrary models
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if layout is None:
        return "no list of layers that run once each and in order"
    cuts = _cuts(sum(len(model.get_submodule(each.layers)) for each in layout.chain))
    reasons, has_own_loss = [], head_loss_of(model) is None
    for kind in (None, *LOSSES):
        if kind == USUAL and matching_key(head.name, USUAL_HEAD_LOSSES) is None:
            continue
        losses = {} if kind is None else {head.name: head_loss_of_kind(head.name, kind)}
        plan = replace(ProposedPlan(execution={"*": order}).policy().declared, head_losses=losses)
        options = {"custom_policy": PlanPolicy(plan)}
        verdicts = (sharded_run(head, "pp2", plain, layers_per_stage=cut, **options)[0] for cut in cuts)
        first = next(
            (f"layers_per_stage={cut}: {each}" for cut, each in zip(cuts, verdicts, strict=True) if each != EXACT), None
        )
        if first is None:
            return {"stages": order.to_dict(), "loss": kind}
        reasons.append(first)
        is_of_loss = OWN_LOSS in first or first.partition(": ")[2].startswith("the loss differs")
        if kind is None and not has_own_loss and not is_of_loss:
            break
    return "; ".join(reasons)


def _cuts(count: int) -> list[list[int]]:
    """Two stages of `count` layers, cut in the middle and at three quarters."""
    firsts = dict.fromkeys(min(max(round(count * share), 1), count - 1) for share in (0.5, 0.75))
    return [[first, count - first] for first in firsts if count > 1]


def add_stages(table: dict[str, Any], family: str, name: str, found: dict[str, Any]) -> None:
    """Add the stages of a class to the table of families."""
    plan = table.setdefault(family, json.loads(ProposedPlan().to_json()))
    plan.setdefault("stages", {})[name] = found["stages"]
    if found["loss"] is not None:
        plan.setdefault("losses", {})[name] = found["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", help="regular expression on Family/Class")
    parser.add_argument("--log", type=Path, help="write the stages to this file instead of the package's table")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    table = json.loads(_TABLE.read_text(encoding="utf-8"))
    for head in head_classes():
        if not re.search(arguments.pattern, f"{head.family}/{head.name}"):
            continue
        start, found = time.monotonic(), stages_of(head)
        reason = found if isinstance(found, str) else f"verified: {', '.join(found['stages']['layers'])}"
        sys.stdout.write(f"{head.family}/{head.name}: {reason} ({time.monotonic() - start:.0f} s)\n")
        sys.stdout.flush()
        if isinstance(found, str):
            continue
        add_stages(table, head.family, head.name, found)
        if arguments.log is not None:
            with arguments.log.open("a", encoding="utf-8") as log:
                log.write(json.dumps({"family": head.family, "name": head.name, **found}) + "\n")
    if arguments.log is None:
        rows = [f"{json.dumps(name)}: {json.dumps(plan)}" for name, plan in sorted(table.items())]
        _TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    stop_pools()


if __name__ == "__main__":
    main()
