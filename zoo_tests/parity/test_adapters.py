"""LoRA adapters train like on the unsharded model, whose weights stay what they were.

The adapters are those of a replica of peft, `zoo_tests.peft_like`, because peft cannot be installed where this runs.
What breaks here first: a matrix of an adapter that is not cut like its layer, a gradient that is a partial sum.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.layers import ParallelDropout
from zoo_tests.case import Case, Recipe
from zoo_tests.compare import check_case
from zoo_tests.peft_like import ADAPTER, PeftModel, with_adapters
from zoo_tests.ranks import distributed
from zoo_tests.zoo import FAMILIES

# Column, row, fused, copied and head projections; BERT's classifier is outside of the layers.
_TARGETS = {
    "llama": ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj", "lm_head"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "chatglm2": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "bert": ("query", "value", "output.dense", "classifier"),
}


def _slow(*values: str) -> list:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def _case(family: str, layout: str, **options: object) -> Case:
    head = {"llama": "causal_lm", "gpt2": "lm_head", "chatglm2": "generation", "bert": "sequence"}[family]
    return Case(recipe=Recipe(family=family, head=head, adapters=_TARGETS[family]), layout=layout, **options)


@pytest.mark.parametrize("layout", ["tp2pp2", *_slow("tp2", "tp4", "pp2", "tp2dp2")])
@pytest.mark.parametrize("family", ["llama", *_slow("gpt2", "chatglm2", "bert")])
def test_adapters_train_like_plain_ones(family: str, layout: str, tmp_path: Path) -> None:
    check_case(_case(family, layout), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["split_gather", "all_to_all"])
@pytest.mark.parametrize("family", ["llama", *_slow("gpt2", "chatglm2", "bert")])
def test_adapters_on_cut_sequences(family: str, mode: str, tmp_path: Path) -> None:
    options = (("sequence_parallelism_mode", mode),)
    check_case(
        _case(family, "tp4" if family == "chatglm2" else "tp2", sequence_parallel=True, options=options), tmp_path
    )


@pytest.mark.parametrize("family", _slow("llama", "gpt2", "bert"))
def test_fused_operators_leave_adapters_in(family: str, tmp_path: Path) -> None:
    check_case(_case(family, "tp2", options=(("enable_jit_fused", True),)), tmp_path)


def test_adapters_in_sixteen_bit(tmp_path: Path) -> None:
    case = _case("llama", "tp2dp2")
    check_case(case.but(precision="bf16", optimizer="adamw"), tmp_path, weights=False)


def test_layers_that_repeat_on_one_stage(tmp_path: Path) -> None:
    check_case(Case(recipe=Recipe(family="albert", head="sequence", adapters=("query", "ffn")), layout="tp2"), tmp_path)


def _with_adapters(family: str, head: str, *targets: str, dropout: float = 0.0) -> PeftModel:
    return with_adapters(FAMILIES[family].build(head, torch.float32), targets, dropout=dropout)


def _boost(model: nn.Module, **options: object) -> nn.Module:
    return Booster(plugin=HybridParallelPlugin(**options)).boost(model)


@distributed(2)
def test_only_adapters_are_trained_and_only_features_apart_are_dropped_apart() -> None:
    model = _boost(_with_adapters("llama", "causal_lm", "q_proj", "o_proj", dropout=0.5), tp_size=2)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all(".lora_A." in name or ".lora_B." in name for name in trained)
    attention = model.unwrap().get_base_model().model.layers[0].self_attn
    assert type(attention.q_proj.lora_dropout[ADAPTER]) is nn.Dropout
    assert isinstance(attention.o_proj.lora_dropout[ADAPTER], ParallelDropout)
    assert attention.o_proj.lora_dropout[ADAPTER].training


@pytest.mark.parametrize(("family", "head"), [("llama", "causal_lm"), ("gpt2", "lm_head"), ("chatglm2", "generation")])
@distributed(2)
def test_a_model_with_adapters_generates(family: str, head: str) -> None:
    targets = ("q_proj", "down_proj", "c_attn", "query_key_value", "dense_4h_to_h")
    prompt = FAMILIES[family].batch(head, 0, 3)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    kept = {"input_ids": prompt["input_ids"], "attention_mask": prompt["attention_mask"]}
    native = _with_adapters(family, head, *targets).eval()
    expected = native.generate(**kept, **options)
    assert not torch.equal(expected, FAMILIES[family].build(head, torch.float32).eval().generate(**kept, **options))
    sharded = _boost(_with_adapters(family, head, *targets), tp_size=2).eval()
    assert torch.equal(sharded.generate(**kept, **options), expected)


@distributed(2)
def test_what_cannot_be_cut_is_refused_before_anything_is_changed() -> None:
    embedding = _with_adapters("llama", "causal_lm", "embed_tokens", "q_proj")
    whole = _with_adapters("llama", "causal_lm", "q_proj")
    whole.model.model.layers[1].self_attn.q_proj.lora_variant[ADAPTER] = object()
    repeated = _with_adapters("albert", "sequence", "query")
    overlapped = _with_adapters("llama", "causal_lm", "q_proj")
    overlap = {"tp_size": 2, "enable_sequence_parallelism": True, "enable_sequence_overlap": True}
    for model, options, message in (
        (embedding, {"tp_size": 2}, "embed_tokens adds to Embedding, which is not a linear layer; leave it out"),
        (whole, {"tp_size": 2}, r"layers.1.self_attn.q_proj reads its whole layer \(DoRA\); use plain LoRA"),
        (repeated, {"pp_size": 2}, "layers that several pipeline stages run are not summed over them; use pp_size=1"),
        (overlapped, overlap, "enable_sequence_overlap=True does not support adapters"),
    ):
        before = {name: type(module) for name, module in model.named_modules()}
        with pytest.raises(ConfigurationError, match=message):
            _boost(model, **options)
        assert {name: type(module) for name, module in model.named_modules()} == before
