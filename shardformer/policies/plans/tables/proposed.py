"""Plans that were derived from the models and verified: `proposed.json`, and where its families can be split.

`python -m zoo_tests.campaigns.proposed_plans --ship PATTERN` writes the file. A family without styles has nothing that
tensor parallelism could cut exactly (convolutions and their batch norms): every rank computes all of it. A plan of
transformers takes precedence.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardformer.policies.plans.declared import DeclaredPlan

# Fields of `DeclaredPlan` about pipeline stages, by family; a family without an entry is not split.
_STAGES: dict[str, dict[str, Any]] = {}


def _declared(found: dict[str, Any]) -> DeclaredPlan:
    return DeclaredPlan(
        found["styles"],
        {path: tuple(names) for path, names in found["local"].items()},
        cut_vocabulary=found["cut_vocabulary"],
        whole_logits=found["whole_logits"],
        pipelined=False,
    )


_FOUND = json.loads((Path(__file__).parent / "proposed.json").read_text(encoding="utf-8"))
PROPOSED = {family: replace(_declared(found), **_STAGES.get(family, {})) for family, found in _FOUND.items()}
