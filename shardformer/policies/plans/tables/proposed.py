"""Plans that were derived from the models and verified: `proposed.json`, and where its families can be split.

`python -m zoo_tests.campaigns.proposed_plans --ship PATTERN` writes the file. A family without styles has nothing that
tensor parallelism could cut exactly (convolutions and their batch norms): every rank computes all of it. A plan of
transformers takes precedence. A class without `stages` cannot be split, or not exactly. The
forward of a class in `losses` computes the usual loss of its kind itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardformer.loss.heads import USUAL_HEAD_LOSSES, matching_key
from shardformer.policies.plans.declared import DeclaredPlan
from shardformer.policies.plans.execution_order import ExecutionOrder


def _declared(found: dict[str, Any]) -> DeclaredPlan:
    return DeclaredPlan(
        found["styles"],
        {path: tuple(names) for path, names in found["local"].items()},
        cut_vocabulary=found["cut_vocabulary"],
        whole_logits=found["whole_logits"],
        execution={name: ExecutionOrder.from_dict(order) for name, order in found.get("stages", {}).items()},
        pipelined=False,
        head_losses={
            name: USUAL_HEAD_LOSSES[matching_key(name, USUAL_HEAD_LOSSES)] for name in found.get("losses", ())
        },
    )


_FOUND = json.loads((Path(__file__).parent / "proposed.json").read_text(encoding="utf-8"))
PROPOSED = {family: _declared(found) for family, found in _FOUND.items()}
