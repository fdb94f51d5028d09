"""Resolution: one plan for a model, which says of each part who wrote what is done to it.

What breaks here first: a family whose name is not written out in its file. Look in `registry.py` and `resolve.py`
of `shardformer/policies`.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shardformer import Argument, Col_Layer, SlotPolicy, TPInfo
from shardformer.policies import families
from shardformer.policies.base import Origin, Policy
from shardformer.policies.mixers import MIXER
from shardformer.policies.plans.plan import Plan, families_in, row_of
from shardformer.policies.plans.policy import PlanPolicy
from shardformer.policies.registry import family_files, family_policies
from shardformer.policies.user_policy import SlotPolicyAdapter, TPInfoPolicy
from shardformer.shard_config import ShardConfig
from shardformer.shardformer import resolve

_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}


def _model(name: str, **config: Any) -> nn.Module:
    with torch.device("meta"):
        sizes = {**_SIZES, "vocab_size": 8, "pad_token_id": 0, **config}
        return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes))


def _origins(model: nn.Module, policy: Policy | None = None) -> dict[str, Origin]:
    return {path: entry.origin for path, entry in resolve(model, policy=policy).entries.items()}


def test_every_entry_says_who_wrote_it() -> None:
    bamba = resolve(_model("Bamba", attn_layer_indices=[1], mamba_n_heads=8))
    assert bamba.origin is Origin.TRANSFORMERS
    assert bamba.entries["layers.*.mamba.in_proj"].origin is Origin.MIXER
    assert bamba.entries["layers.*.mamba.in_proj"].style == MIXER
    assert bamba.entries["layers.*.feed_forward.up_proj"].origin is Origin.COMPLETED
    assert "layers.*.mamba.in_proj" in str(bamba) and Origin.MIXER.value in str(bamba)
    gemma = _origins(_model("Gemma2", num_key_value_heads=2, head_dim=8))
    assert gemma["layers.*.self_attn.q_proj"] is Origin.TRANSFORMERS
    assert set(_origins(_model("Bert")).values()) == {Origin.FAMILY}
    assert _origins(_model("MegatronBert"))["encoder.layer.*.attention.self.query"] is Origin.DECLARED
    assert set(_origins(transformers.BlipModel(transformers.BlipConfig())).values()) == {Origin.DERIVED}


class _Slots(SlotPolicy):
    """One column."""

    @staticmethod
    def argument_policy(model_config: Any, shard_config: int) -> Mapping[type[nn.Module], Argument]:
        """Return the slot of a layer."""
        layer = importlib.import_module("transformers.models.bert.modeling_bert").BertLayer
        return {layer: Argument(param_funcs=[_Slots.mlp_in])}

    @staticmethod
    def mlp_in() -> list[Col_Layer]:
        """Return the projection h -> 4h."""
        return [Col_Layer(weight="intermediate.dense.weight", gather_output=True)]


def test_what_users_write_is_resolved_in_the_same_way() -> None:
    model = _model("Bert")
    info = TPInfoPolicy(TPInfo().shard_col({"intermediate.dense": {"gather_output": True}}))
    path = "encoder.layer.0.intermediate.dense"
    assert _origins(model, info)[path] is Origin.TP_INFO
    layers = [f"encoder.layer.{index}.intermediate.dense" for index in range(2)]
    assert _origins(model, SlotPolicyAdapter(_Slots)) == dict.fromkeys(layers, Origin.SLOTS)
    own = PlanPolicy(Plan({"intermediate.dense": "colwise"}))
    assert _origins(model, own) == {"encoder.layer.*.intermediate.dense": Origin.USER}
    uniform = resolve(model, ShardConfig(sharding_dim=-1))
    assert uniform.origin is Origin.UNIFORM and uniform.entries[path].style == "colwise_gather_output"


_LOADED = """
import sys
import torch, transformers
from shardformer.shardformer import resolve
sizes = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32, vocab_size=8)
folder = "shardformer.policies.families."
for name in ("Gemma2", "Llama", "Roberta", "RemBert"):
    with torch.device("meta"):
        model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes))
    resolve(model)
    print(*sorted(name.rpartition(".")[2] for name in sys.modules if name.startswith(folder)))
"""


def test_a_family_imports_no_other_kind_of_architecture() -> None:
    done = subprocess.run([sys.executable, "-c", _LOADED], stdout=subprocess.PIPE, text=True, check=True)
    loaded = ["", "decoders", "decoders encoders", "decoders encoders"]
    assert done.stdout.splitlines() == loaded


def test_every_family_is_found_by_its_name() -> None:
    for family, policy in family_policies().items():
        assert policy.__module__.rpartition(".")[2] in family_files(family)


@pytest.mark.parametrize("file", ["completed.json", "declared.json", "proposed.json"])
def test_every_row_says_something_of_a_family_or_is_what_others_are_like(file: str) -> None:
    table = json.loads((Path(families.__path__[0]) / file).read_text(encoding="utf-8"))
    shared = {name for row in table.values() for name in row.get("like", ())}
    assert shared == {name for name in table if name.startswith("_")}
    known = {*Plan.__dataclass_fields__, "stages", "losses", "classes", "completed", "usual_losses"}
    for family in families_in(file):
        row = row_of(file, family)
        assert row and row.keys() <= known, family
    assert row_of(file, "no_family") == row_of(file, None) == {}


def test_a_row_extends_those_that_it_is_like() -> None:
    styles = row_of("declared.json", "bros")["styles"]
    assert styles == row_of("declared.json", "_bert")["styles"] | {"bbox_projection": "replicated_with_grad_allreduce"}
