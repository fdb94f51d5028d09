"""Encoders of text: classes of BERT, RoBERTa, their likes, ALBERT and DeBERTa-v2."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial

from torch import nn

from shardformer.attention.own_attention import DebertaRegistryAttention, MPNetRegistryAttention
from shardformer.distributed.sequence_parallel import run_whole
from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.loss.text import causal_lm, pretraining, recurring_spans, replaced_tokens
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.rules import GATHERS, HEADS, TablePolicy, described, local, rules, variant
from shardformer.stages.stage import IdentityPlaceholder, Received, StageLayout

_CLASSIFIERS = ("ForSequenceClassification", "ForMultipleChoice", "ForTokenClassification", "ForQuestionAnswering")
_NEXT_SENTENCE = ("ForMaskedLM", "ForNextSentencePrediction", *_CLASSIFIERS)
_LOCAL = local(HEADS, all_head_size="hidden_size")
_DROPOUT = rules.residual_dropout("dropout")
_OUTPUT = (rules.layer_norm("LayerNorm"), _DROPOUT)
_LAYERS = {
    "{}Embeddings": [rules.vocab("word_embeddings")],
    "{}SelfAttention": [GATHERS, _LOCAL, rules.column("query", "key", "value", num_heads=HEADS)],
    "{}CrossAttention": [
        GATHERS,
        _LOCAL,
        rules.column("query", num_heads=HEADS),
        rules.column("key", "value", num_heads=HEADS),
    ],
    "{}SelfOutput": [rules.row("dense", num_heads=HEADS), *_OUTPUT],
    "{}Intermediate": [GATHERS, rules.column("dense")],
    "{}Output": [rules.row("dense"), *_OUTPUT],
}
_LM_HEAD = {"{}LMHead": [rules.head("decoder")]}


class BertPolicy(TablePolicy):
    """Policy for BERT. Its layers normalise after each tensor-parallel region, so norms are between regions."""

    family, prefix = "bert", "Bert"
    heads: tuple[str, ...] = ("Model", "ForPreTraining", "LMHeadModel", *_NEXT_SENTENCE)
    stages = StageLayout(layers="encoder.layer", first={"embeddings": Received}, last=("pooler",))
    supports_sequence_parallel = True
    table = {**_LAYERS, "{}LMPredictionHead": [rules.head("decoder")]}


class RobertaPolicy(BertPolicy):
    """Policy for RoBERTa."""

    family, prefix = "roberta", "Roberta"
    heads = ("Model", "ForCausalLM", "ForMaskedLM", *_CLASSIFIERS)
    table = {**_LAYERS, **_LM_HEAD}


class ElectraPolicy(BertPolicy):
    """Policy for ELECTRA: the discriminator, and the language-model heads of the generator."""

    family, prefix = "electra", "Electra"
    heads = ("Model", "ForPreTraining", "ForCausalLM", "ForMaskedLM", *_CLASSIFIERS)
    stages = StageLayout(
        layers="encoder.layer", first={"embeddings": Received, "embeddings_project": IdentityPlaceholder}
    )
    head_losses = {**USUAL_HEAD_LOSSES, "ForPreTraining": replaced_tokens}
    table = _LAYERS | dict.fromkeys(("{}ForMaskedLM", "{}ForCausalLM"), [rules.head("generator_lm_head")])


class RobertaPreLayerNormPolicy(RobertaPolicy):
    """Policy for RoBERTa-PreLayerNorm, which has a norm before each region and one after the layers."""

    family, prefix = "roberta_prelayernorm", "RobertaPreLayerNorm"
    stages = StageLayout(layers="encoder.layer", first={"embeddings": Received}, last=("LayerNorm", "pooler"))
    table = {
        **RobertaPolicy.table,
        "{}Attention": [rules.layer_norm("LayerNorm")],
        "{}SelfOutput": [rules.row("dense", num_heads=HEADS), _DROPOUT],
        "{}Intermediate": [GATHERS, rules.layer_norm("LayerNorm"), rules.column("dense")],
        "{}Output": [rules.row("dense"), _DROPOUT],
    }


class BertGenerationPolicy(BertPolicy):
    """Policy for BertGeneration: the encoder, and the decoder, which is a causal language model."""

    family, prefix = "bert_generation", "BertGeneration"
    heads = ("Encoder", "Decoder")
    head_losses = {**USUAL_HEAD_LOSSES, "Decoder": causal_lm}
    table = {**_LAYERS, "{}OnlyLMHead": [rules.head("decoder")]}


class SplinterPolicy(BertPolicy):
    """Policy for Splinter, whose heads predict spans."""

    family, prefix = "splinter", "Splinter"
    heads = ("Model", "ForQuestionAnswering", "ForPreTraining")
    stages = StageLayout(layers="encoder.layer", first={"embeddings": Received})
    head_losses = {**USUAL_HEAD_LOSSES, "ForPreTraining": recurring_spans}
    table = _LAYERS


class MPNetPolicy(BertPolicy):
    """Policy for MPNet. Every stage holds the position biases, which are computed once and sharded by heads."""

    family, prefix = "mpnet", "MPNet"
    own_attention = {"MPNetSelfAttention": MPNetRegistryAttention}
    heads = ("Model", "ForMaskedLM", *_CLASSIFIERS)
    stages = StageLayout(
        layers="encoder.layer",
        first={"embeddings": Received},
        every=("encoder.relative_attention_bias",),
        last=("pooler",),
        tuple_output=True,
    )
    table = {
        **_LAYERS,
        "{}SelfAttention": [
            GATHERS,
            local(all_head_size="hidden_size"),
            rules.column("q", "k", "v", num_heads=HEADS),
            rules.row("o", num_heads=HEADS),
            rules.region_dropout("dropout"),
        ],
        "{}Attention": _OUTPUT,
        "{}Encoder": [rules.head_sharded_embedding("relative_attention_bias")],
        **_LM_HEAD,
    }


class DistilBertPolicy(TablePolicy):
    """Policy for DistilBERT."""

    family, prefix = "distilbert", "DistilBert"
    heads = ("Model", "ForMaskedLM", *_CLASSIFIERS)
    stages = StageLayout(layers="transformer.layer", first={"embeddings": Received})
    supports_sequence_parallel = True
    head_fields = ("n_heads",)
    table = {
        "Embeddings": [rules.vocab("word_embeddings")],
        "{}SelfAttention": [
            GATHERS,
            rules.column("q_lin", "k_lin", "v_lin", num_heads="n_heads"),
            rules.row("out_lin", num_heads="n_heads"),
        ],
        "FFN": [GATHERS, rules.column("lin1"), rules.row("lin2"), _DROPOUT],
        "TransformerBlock": [rules.layer_norm("sa_layer_norm", "output_layer_norm")],
        "{}ForMaskedLM": [rules.head("vocab_projector")],
    }


ErniePolicy = variant(BertPolicy, "ernie", "Ernie", heads=("Model", "ForPreTraining", "ForCausalLM", *_NEXT_SENTENCE))
LayoutLMPolicy = variant(  # its embeddings alone use the boxes on the page
    BertPolicy,
    "layoutlm",
    "LayoutLM",
    heads=("Model", "ForMaskedLM", *(name for name in _CLASSIFIERS if name != "ForMultipleChoice")),
)
XLMRobertaPolicy = variant(RobertaPolicy, "xlm_roberta", "XLMRoberta")
CamembertPolicy = variant(RobertaPolicy, "camembert", "Camembert")
Data2VecTextPolicy = variant(
    RobertaPolicy, "data2vec_text", "Data2VecText", module="transformers.models.data2vec.modeling_data2vec_text"
)


class RepeatedLayers(nn.ModuleList):
    """A layer list whose length is the depth of the model; the layers keep their names and parameters.

    Args:
        order: index of the layer that runs at each position.
    """

    def __init__(self, modules: nn.ModuleList, order: list[int]) -> None:
        # Distinct objects with the same parameters, because a stage modifies its first layer only.
        self.positions = [_twin(modules[index]) for index in order]
        super().__init__()
        self.order = order
        for name, module in modules.named_children():
            self.add_module(name, module)

    def positions_of(self, index: int) -> list[int]:
        """Return the positions at which layer `index` runs."""
        return [position for position, used in enumerate(self.order) if used == index]

    def keep_used(self) -> None:
        """Delete the layers that this stage does not run at any position."""
        for index in list(self._modules):
            used = {id(child) for layer in self.positions for child in layer._modules.values()}
            if not any(id(child) in used for child in self._modules[index]._modules.values()):
                del self._modules[index]

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.positions)

    def __getitem__(self, position: int) -> nn.Module:
        return self.positions[position]

    def __setitem__(self, position: int, layer: nn.Module) -> None:
        self.positions[position] = layer


def _twin(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    for name in (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs",
    ):
        twin.__dict__[name] = copy.copy(module.__dict__[name])
    return twin


class AlbertPolicy(TablePolicy):
    """Policy for ALBERT. Stages that run the same group share its parameters."""

    family, prefix = "albert", "Albert"
    heads = (
        "Model",
        "ForPreTraining",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMultipleChoice",
    )
    supports_sequence_parallel = True
    repeats_layers = True
    stages = StageLayout(
        layers="encoder.albert_layer_groups",
        first={"embeddings": Received, "encoder.embedding_hidden_mapping_in": IdentityPlaceholder},
        last=("pooler",),
    )
    table = {
        "AlbertEmbeddings": [rules.vocab("word_embeddings")],
        "AlbertAttention": [
            rules.column("query", "key", "value", num_heads=HEADS),
            rules.row("dense", num_heads=HEADS),
            rules.layer_norm("LayerNorm"),
            rules.residual_dropout("output_dropout"),
        ],
        "AlbertLayer": [
            rules.column("ffn", gathers_sequence=True),
            rules.row("ffn_output"),
            rules.layer_norm("full_layer_layer_norm"),
        ],
        "AlbertMLMHead": [rules.head("decoder")],
    }
    head_losses = {
        **USUAL_HEAD_LOSSES,
        "ForPreTraining": partial(pretraining, pair_label="sentence_order_label", pair_logits="sop_logits"),
    }

    def preprocess(self) -> nn.Module:
        """Give the list of layer groups the depth of the model if its first and last layer need hooks of their own."""
        encoder = self.model.get_submodule(self.base_path).encoder
        depth, groups = encoder.config.num_hidden_layers, encoder.config.num_hidden_groups
        shards = (self.shard_config.sequence, self.shard_config.context)
        has_hooks = self.shard_config.stage_manager.num_stages > 1 or any(each is not None for each in shards)
        if has_hooks and not isinstance(encoder.albert_layer_groups, RepeatedLayers):
            order = [int(position / (depth / groups)) for position in range(depth)]  # same formula as in transformers
            encoder.albert_layer_groups = RepeatedLayers(encoder.albert_layer_groups, order)
            # The encoder runs group `position * groups / depth` at each position; groups = depth makes it the position.
            encoder.config = copy.copy(encoder.config)
            encoder.config.num_hidden_groups = depth
        return self.model

    def module_policy(self) -> Mapping[str | type[nn.Module], ModulePolicyDescription]:
        """Return the table; attention, which adds its residual and normalises the sum, sees whole sequences."""
        table, config = dict(super().module_policy()), self.shard_config
        if config.sequence is not None and not config.uses_ulysses:
            attention = described(self.table["AlbertAttention"], self, config.without_sequence())
            attention.param_replacement.append(partial(run_whole, region=config.sequence))
            table["AlbertAttention"] = attention
        return table


_OUTPUT = (rules.layer_norm("LayerNorm"), rules.residual_dropout("dropout"))


def _has_own_vocabulary(policy: Policy) -> bool:
    """Return whether no head reads the embedding; the newer one uses its weight, and a bias of the full vocabulary."""
    return not hasattr(policy.model, "lm_predictions")


def _shares_key(policy: Policy) -> bool:
    """Return whether query and key also read the table of positions; the value does not."""
    return getattr(policy.model.config, "share_att_key", False)


class DebertaV2Policy(TablePolicy):
    """Policy for DeBERTa-v2. All stages hold the table of relative positions, because every layer reads it."""

    family, prefix = "deberta_v2", "DebertaV2"
    own_attention = {"DisentangledSelfAttention": DebertaRegistryAttention}
    heads = (
        "Model",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMultipleChoice",
    )
    # Attention reads the table of relative positions, which is not sharded, in addition to the sequence.
    supports_sequence_parallel = False
    table = {
        "{}Embeddings": [rules.vocab("word_embeddings", when=_has_own_vocabulary)],
        "DisentangledSelfAttention": [
            GATHERS,
            local(HEADS),
            rules.column("query_proj", "key_proj", num_heads=HEADS),
            rules.column("value_proj", num_heads=HEADS, reads="value_proj", when=_shares_key),
            rules.column(
                "value_proj", num_heads=HEADS, reads="query_proj", when=lambda policy: not _shares_key(policy)
            ),
            rules.column("pos_key_proj?", num_heads=HEADS),
            rules.column("pos_query_proj?", num_heads=HEADS),
            rules.region_dropout("dropout"),
        ],
        "{}SelfOutput": [rules.row("dense", num_heads=HEADS), *_OUTPUT],
        "{}Intermediate": [GATHERS, rules.column("dense")],
        "{}Output": [rules.row("dense"), *_OUTPUT],
        "Legacy{}LMPredictionHead": [rules.head("decoder")],
    }

    @property
    def stages(self) -> StageLayout:
        """The stage layout; the newer head reads the embedding's weight on the last stage."""
        return StageLayout(
            layers="encoder.layer",
            first={"embeddings": Received, "encoder.conv": Received},
            every=("encoder.rel_embeddings", "encoder.LayerNorm"),
            last=() if _has_own_vocabulary(self) else ("embeddings.word_embeddings",),
            tuple_output=2,
        )
