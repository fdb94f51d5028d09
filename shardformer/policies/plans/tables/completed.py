"""What plans of transformers, or of this package, leave whole and was derived from the models: `completed.json`.

`python -m zoo_tests.campaigns.proposed_plans --complete PATTERN` writes the file.
"""

from __future__ import annotations

import json
from pathlib import Path

from shardformer.policies.plans.declared import DeclaredPlan

_FOUND = json.loads((Path(__file__).parent / "completed.json").read_text(encoding="utf-8"))
COMPLETED = {
    family: DeclaredPlan(found["styles"], {path: tuple(names) for path, names in found["local"].items()})
    for family, found in _FOUND.items()
}
