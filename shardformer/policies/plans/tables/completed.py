"""What plans of transformers, or of this package, leave whole.

`python -m zoo_tests.campaigns.proposed_plans --complete PATTERN` derives `completed.json` from tiny models; tables of
tokens that are not the vocabulary of the head, and experts in front of a norm, are declared here.
"""

from __future__ import annotations

import json
from pathlib import Path

from shardformer.policies.plans.completion import Completion
from shardformer.policies.plans.declared import DeclaredPlan

_PER_LAYER = {"embed_tokens_per_layer": "embedding_rowwise"}
_DECLARED = {
    "blt": {"encoder_hash_tok_embedding": "embedding_rowwise"},
    "csm": {"embed_text_tokens": "embedding_rowwise"},
    "diffusion_gemma": _PER_LAYER,
    "gemma3n": _PER_LAYER,
    "gemma4": _PER_LAYER,
    "muse_spark": {
        "mlp.experts.gate_up_proj": "packed_colwise",
        "mlp.experts.down_proj": "rowwise",
        "mlp.experts": "moe_tp_normed_experts",
    },
}
_DERIVED = json.loads((Path(__file__).parent / "completed.json").read_text(encoding="utf-8"))


def _of_family(family: str) -> Completion:
    found = _DERIVED.get(family, {"styles": {}, "local": {}, "classes": {}})
    local = {path: tuple(names) for path, names in found["local"].items()}
    return Completion(_DECLARED.get(family, {}), DeclaredPlan(found["styles"], local), found["classes"])


COMPLETED = {family: _of_family(family) for family in sorted({*_DERIVED, *_DECLARED})}
