"""Slot policies train to the numbers of plain training, through `ShardModel` and as a `custom_policy`.

What breaks here first: a path that transformers has renamed (the slots in this file). Look in
`shardformer/policies/user_forms.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.bert import modeling_bert as bert
from transformers.models.gpt2 import modeling_gpt2 as gpt2

from shardformer import Argument, Col_Layer, Layer, Row_Layer, ShardModel, SlotPolicy
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.ranks import distributed
from zoo_tests.harness.reference import inputs_of


class BertSlots(SlotPolicy):
    @staticmethod
    def argument_policy(model_config: Any, shard_config: int) -> Mapping[type[nn.Module], Argument]:
        heads, width = model_config.num_attention_heads // shard_config, model_config.hidden_size // shard_config
        attributes = {"attention.self.num_attention_heads": heads, "attention.self.all_head_size": width}
        layer = [BertSlots.attn_in, BertSlots.attn_out, BertSlots.mlp_in, BertSlots.mlp_out]
        return {
            bert.BertLayer: Argument(attr_dict=attributes, param_funcs=layer),
            bert.BertEmbeddings: Argument(param_funcs=[BertSlots.embedding]),
            bert.BertLMPredictionHead: Argument(param_funcs=[BertSlots.unembedding]),
        }

    @staticmethod
    def binding_policy() -> Mapping[str, str]:
        return {"bert.embeddings.word_embeddings.weight": "cls.predictions.decoder.weight"}

    @staticmethod
    def attn_in() -> Sequence[Layer]:
        names = ("query", "key", "value")
        return [Col_Layer(weight=f"attention.self.{name}.weight", bias=f"attention.self.{name}.bias") for name in names]

    @staticmethod
    def attn_out() -> Sequence[Layer]:
        return [Row_Layer(weight="attention.output.dense.weight", bias="attention.output.dense.bias")]

    @staticmethod
    def mlp_in() -> Sequence[Layer]:
        return [Col_Layer(weight="intermediate.dense.weight", bias="intermediate.dense.bias")]

    @staticmethod
    def mlp_out() -> Sequence[Layer]:
        return [
            Row_Layer(weight="output.dense.weight", bias="output.dense.bias"),
            Layer(weight="output.LayerNorm.weight"),
        ]

    @staticmethod
    def embedding() -> Sequence[Layer]:
        return [Col_Layer(weight="word_embeddings.weight")]

    @staticmethod
    def unembedding() -> Sequence[Layer]:
        return [Col_Layer(weight="decoder.weight", bias="decoder.bias", gather_output=True)]


class Gpt2Slots:
    """Inherits nothing."""

    @staticmethod
    def argument_policy(model_config: Any, shard_config: int) -> Mapping[type[nn.Module], Argument]:
        size = model_config.n_embd // shard_config
        attributes = {
            "attn.num_heads": model_config.n_head // shard_config, "attn.split_size": size, "attn.embed_dim": size
        }  # fmt: skip
        return {gpt2.GPT2Block: Argument(attributes, [Gpt2Slots.attn_in, Gpt2Slots.attn_out, Gpt2Slots.mlp])}

    @staticmethod
    def attn_in() -> Sequence[Layer]:
        return [Col_Layer(weight="attn.c_attn.weight", n_cast=3)]

    @staticmethod
    def attn_out() -> Sequence[Layer]:
        return [Row_Layer(weight="attn.c_proj.weight"), Col_Layer(weight="crossattention.q_attn.weight", ignore=True)]

    @staticmethod
    def mlp() -> Sequence[Layer]:
        return [Col_Layer(weight="mlp.c_fc.weight"), Row_Layer(weight="mlp.c_proj.weight")]


SLOTS = {"bert": BertSlots, "gpt2": Gpt2Slots}
HEADS = {"bert": "masked_lm", "gpt2": "lm_head"}


def _case(family: str, layout: str, **recipe: Any) -> Case:
    options = (("custom_policy", SLOTS[family]),)
    return Case(recipe=Recipe(family=family, head=HEADS[family], **recipe), layout=layout, options=options)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(_case("bert", "tp2"), id="bert-tp2"),
        pytest.param(_case("gpt2", "tp2pp2", optimizer="adamw", max_norm=0.05), id="gpt2-tp2pp2"),
        pytest.param(_case("bert", "tp4"), id="bert-tp4", marks=pytest.mark.slow),
        pytest.param(_case("bert", "tp2pp2", max_norm=0.05), id="bert-tp2pp2", marks=pytest.mark.slow),
        pytest.param(_case("gpt2", "tp2dp2"), id="gpt2-tp2dp2", marks=pytest.mark.slow),
    ],
)
def test_trains_like_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@pytest.mark.parametrize("policy", [BertSlots, None], ids=["slots", "automatic"])
@distributed(2)
def test_shard_model(policy: type | None) -> None:
    recipe = Recipe(family="bert", head="masked_lm")
    plain = recipe.model().eval()
    model = ShardModel(recipe.model(), policy).model.eval()
    batch = recipe.batch(0)
    found, expected = (each(**inputs_of(recipe.zoo_head, batch)) for each in (model, plain))
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-10, atol=1e-10)
    expected.loss.backward()
    found.loss.backward()
    name = "bert.encoder.layer.1.attention.output.dense.bias"  # whole on every rank
    torch.testing.assert_close(model.get_parameter(name).grad, plain.get_parameter(name).grad, rtol=1e-10, atol=1e-12)
    assert model.bert.encoder.layer[0].attention.self.query.weight.shape[0] * 2 == plain.config.hidden_size
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


class Louder(bert.BertPooler):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden_states)


class Injected(BertSlots):
    @staticmethod
    def inject_policy() -> tuple[type[nn.Module], type[nn.Module]]:
        return bert.BertPooler, Louder


class OfNoModule(SlotPolicy):
    @staticmethod
    def argument_policy(model_config: Any, shard_config: int) -> Mapping[type[nn.Module], Argument]:
        return {gpt2.GPT2Block: Argument()}


class Unbound(BertSlots):
    @staticmethod
    def binding_policy() -> Mapping[str, str]:
        return {"bert.embeddings.word_embeddings.weight": "decoder.weight"}


class Misspelt(BertSlots):
    @staticmethod
    def argument_policy(model_config: Any, shard_config: int) -> Mapping[type[nn.Module], Argument]:
        return {bert.BertLayer: Argument(param_funcs=[Misspelt.mlp_in])}

    @staticmethod
    def mlp_in() -> Sequence[Layer]:
        return [Col_Layer(weight="intermediates.dense.weight")]


@distributed(2)
def test_injected_classes_and_refusals() -> None:
    model = ShardModel(
        bert.BertModel(Recipe(family="bert", head="masked_lm").model().config), _without_head(Injected)
    ).model
    assert type(model.pooler) is Louder
    for policy, message in (
        (OfNoModule, "OfNoModule.argument_policy names GPT2Block, and BertForMaskedLM has no such module"),
        (Unbound, "Unbound.binding_policy names decoder.weight, which BertForMaskedLM does not have"),
        (Misspelt, "BertLayer has no sub-module 'intermediates.dense'; the nearest are"),
    ):
        with pytest.raises(ValueError, match=message):
            ShardModel(Recipe(family="bert", head="masked_lm").model(), policy)
    with pytest.raises(TypeError, match="3 is not a policy; use a Policy, or a class with argument_policy"):
        ShardModel(Recipe(family="bert", head="masked_lm").model(), 3)


def _without_head(slots: type[BertSlots]) -> type[BertSlots]:
    """For the bare model."""

    def argument_policy(model_config: Any, shard_config: int) -> Mapping[type[nn.Module], Argument]:
        found = dict(slots.argument_policy(model_config, shard_config))
        del found[bert.BertLMPredictionHead]
        return found

    return type(slots.__name__, (slots,), {"argument_policy": staticmethod(argument_policy), "binding_policy": dict})


@pytest.mark.parametrize(
    "layer", [Col_Layer(), Col_Layer(weight="weight"), Row_Layer(weight="a.weight", bias="b.bias")]
)
def test_a_layer_that_names_none(layer: Layer) -> None:
    with pytest.raises(ValueError, match=r"names no layer; use weight='path.of.the.layer.weight'"):
        _ = layer.path
