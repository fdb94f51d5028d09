"""What plans of transformers, or of this package, leave whole.

`python -m zoo_tests.campaigns.proposed_plans --complete PATTERN` derives `completed.json` from tiny models; tables of
tokens that are not the vocabulary of the head, and experts in front of a norm, are declared here.

Plans that were derived from the models and verified: `proposed.json`, and where its families can be split.

`python -m zoo_tests.campaigns.proposed_plans --ship PATTERN` writes the file. A family without styles has nothing that
tensor parallelism could cut exactly (convolutions and their batch norms): every rank computes all of it. A plan of
transformers takes precedence. A class without `stages` cannot be split, or not exactly. The forward of a class in
`losses` computes a loss itself: the usual one of its kind, a mean over its labels, or a sum.
"""

from __future__ import annotations

import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from shardformer.loss.heads import USUAL_HEAD_LOSSES, HeadLossBuilder, matching_key
from shardformer.loss.of_forward import FORWARD_LOSSES
from shardformer.loss.terms import HeadLoss
from shardformer.policies.plans.completion import Completion
from shardformer.policies.plans.declared import DeclaredPlan
from shardformer.policies.plans.execution_order import ExecutionOrder

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


USUAL = "usual"
LOSSES = (*FORWARD_LOSSES, USUAL)  # the usual one reads logits that may be sharded, which a forward may not expect


def head_loss_builder(name: str, kind: str) -> HeadLossBuilder:
    """Return the loss of a class, of one of the kinds in `LOSSES`; a batch with other labels has another loss.

    Raises:
        KeyError: there is no usual loss of such a class.
    """
    build = USUAL_HEAD_LOSSES[matching_key(name, USUAL_HEAD_LOSSES)] if kind == USUAL else FORWARD_LOSSES[kind]
    return partial(_of_known_labels, build)


def _of_known_labels(build: HeadLossBuilder, model: nn.Module) -> HeadLoss | None:
    loss = build(model)
    if loss is not None:
        read = [name for name in inspect.signature(model.forward).parameters if "label" in name]
        known = {term.labels for term in loss.terms}
        loss.further_entries = (*loss.further_entries, *(name for name in read if name not in known))
    return loss


def _declared(found: dict[str, Any]) -> DeclaredPlan:
    return DeclaredPlan(
        found["styles"],
        {path: tuple(names) for path, names in found["local"].items()},
        cut_vocabulary=found["cut_vocabulary"],
        whole_logits=found["whole_logits"],
        execution={name: ExecutionOrder.from_dict(order) for name, order in found.get("stages", {}).items()},
        pipelined=False,
        head_losses={name: head_loss_builder(name, kind) for name, kind in found.get("losses", {}).items()},
    )


_FOUND = json.loads((Path(__file__).parent / "proposed.json").read_text(encoding="utf-8"))
PROPOSED = {family: _declared(found) for family, found in _FOUND.items()}
