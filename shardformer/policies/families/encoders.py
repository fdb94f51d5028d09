"""Encoders of text: classes of BERT, RoBERTa, their likes, ALBERT and DeBERTa-v2; plans of all others."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardformer.attention.own_attention import DebertaRegistryAttention, MPNetRegistryAttention
from shardformer.distributed.sequence_parallel import run_whole
from shardformer.loss.heads import USUAL_HEAD_LOSSES, own_loss, with_further_entries
from shardformer.loss.text import (
    causal_lm,
    classes_of_marked,
    classes_of_tokens,
    masked_lm,
    mean_of_marked,
    pretraining,
    recurring_spans,
    replaced_tokens,
)
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.families import BERT, GATED, LLAMA
from shardformer.policies.plans.plan import Plan
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


class ReceivedTokens(Received):
    """Placeholder for an embedding whose token table the model calls directly."""

    @property
    def tok_embeddings(self) -> Received:
        """The placeholder itself."""
        return self


class ReceivedUnscaled(Received):
    """Placeholder for an embedding that returns the factor of its quantised values, too."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Return a dummy shaped like the hidden state; None, as nothing is quantised."""
        return self.stage_input.dummy(), None


_BERT_LOCAL = {"self": ("num_attention_heads", "all_head_size")}
_BERT = Plan(BERT, _BERT_LOCAL)
# Attention is replicated if heads are mixed before they are concatenated.
_FEED_FORWARD = Plan(
    {"intermediate.dense": "colwise", "output.dense": "rowwise", "attention.output.dense": "replicate"}
)
_PAGE_BIASES = ("encoder.rel_pos_bias", "encoder.rel_pos_x_bias", "encoder.rel_pos_y_bias")
_MODERN = Plan(
    {"attn.Wqkv": "fused_colwise", "attn.Wo": "rowwise", "mlp.Wi": "packed_colwise", "mlp.Wo": "rowwise"}
    | {"mlp.drop": "dropout"}
)
# Question answering with a beam search over answer spans has a loss of its own.
_XLM = {
    "styles": {
        "q_lin": "colwise",
        "k_lin": "colwise",
        "v_lin": "colwise",
        "out_lin": "rowwise",
        "lin1": "colwise",
        "lin2": "rowwise",
        "attentions.*": "draws_per_rank",
    },
    "local": {"attentions.*": ("n_heads", "dim")},
    "layers": "attentions",
    "sublayer_lists": ("layer_norm1", "ffns", "layer_norm2"),
    "every": ("position_embeddings", "lang_embeddings", "layer_norm_emb"),
    "first": {"embeddings": Received},
}
_LLAMA = Plan(LLAMA)


def _first_block(model: nn.Module) -> dict[str, int]:
    """Return the last layer of Funnel's first block, which the decoder reads, too."""
    config = model.config
    return {f"encoder.blocks.0.{config.block_sizes[0] - 1}": 1}


def _runs_layers_once(model: nn.Module) -> bool:
    """Return whether no block of Funnel runs several times."""
    return all(count == 1 for count in model.config.block_repeats)


PLANS = {
    # All linear layers and embeddings are classes of its own, which could quantise.
    "ibert": Plan(
        {},
        layers="encoder.layer",
        first={"embeddings": ReceivedUnscaled},
        needs={"quant_mode": False},
        cut_vocabulary=False,
    ),
    "big_bird": Plan(BERT, _BERT_LOCAL, needs={"attention_type": "original_full"}),
    # Every head adds products with the embedding of the distances between boxes, so its gradient is partial.
    "bros": Plan(
        {**BERT, "bbox_projection": "replicated_with_grad_allreduce"},
        _BERT_LOCAL,
        every=("bbox_embeddings",),
        head_losses={
            "BrosForTokenClassification": partial(classes_of_marked, "bbox_first_token_mask"),
            "BrosSpadeEEForTokenClassification": own_loss,
            "BrosSpadeELForTokenClassification": partial(mean_of_marked, "bbox_first_token_mask"),
        },
    ),
    "canine": Plan(
        BERT,
        _BERT_LOCAL,
        layers="encoder.layer",
        kept_outputs={"initial_char_encoder": 1},  # characters are read again after the layers
        changes_shapes=True,
    ),
    "convbert": replace(
        _FEED_FORWARD, keeps_whole=lambda part: type(getattr(part, "dense", None)).__name__ == "GroupedLinearLayer"
    ),
    # Query, key and value of a head are contiguous.
    "deberta": Plan(
        {**BERT, "self.in_proj": "colwise", "self.pos_proj": "colwise", "self.pos_q_proj": "colwise"}
        | {"self.q_bias": "colwise", "self.v_bias": "colwise"}
        | dict.fromkeys(("self.head_logits_proj", "self.head_weights_proj"), "gathered"),
        _BERT_LOCAL,
        every=("encoder.rel_embeddings",),
        # With legacy=False, the head multiplies with the whole weight of the embedding.
        last=lambda model: ("embeddings.word_embeddings",) if hasattr(model, "lm_predictions") else (),
        cut_vocabulary=lambda model: not hasattr(model, "lm_predictions"),
    ),
    "esm": Plan(BERT, _BERT_LOCAL, whole_logits=True),
    "flaubert": Plan(
        **_XLM,
        needs={"pre_norm": False, "layerdrop": 0.0},
        head_losses={"FlaubertWithLMHeadModel": masked_lm, "FlaubertForQuestionAnswering": own_loss},
    ),
    "esmc": Plan(GATED),  # normalises all heads together
    "fnet": _BERT,
    "funnel": Plan(
        {"ffn.linear_1": "colwise", "ffn.linear_2": "rowwise"},
        layers=("encoder.blocks.*", "decoder.layers"),
        carried_inputs=("key", "value"),
        kept_outputs=_first_block,
        pipelined=_runs_layers_once,
        changes_shapes=True,
        head_losses={"FunnelForPreTraining": replaced_tokens},
    ),
    "gte": _LLAMA,
    "jina_embeddings_v3": Plan({**LLAMA, "mlp.fc1": "colwise", "mlp.fc2": "rowwise"}),
    "layoutlmv3": Plan(
        {
            **BERT,
            "attention.self": "local_biases",
            **dict.fromkeys(_PAGE_BIASES, "replicated_with_grad_allreduce"),
        },
        _BERT_LOCAL,
        every=_PAGE_BIASES,
    ),
    "lilt": Plan(
        {**BERT, "self.layout_query": "colwise", "self.layout_key": "colwise", "self.layout_value": "colwise"}
        | {"layout_output.dense": "rowwise", "layout_intermediate.dense": "colwise"},
        _BERT_LOCAL,
        carried_inputs=("layout_inputs",),
        changes_shapes=True,
    ),
    "longformer": _FEED_FORWARD,
    "luke": Plan(
        # Word and entity queries have separate projections for word and entity keys.
        {**BERT, **dict.fromkeys(("self.w2e_query", "self.e2w_query", "self.e2e_query"), "colwise")},
        _BERT_LOCAL,
        first={"entity_embeddings": Received},
        carried_inputs=("entity_hidden_states",),
        head_losses={"LukeForMaskedLM": with_further_entries(masked_lm, "entity_labels")},
    ),
    "markuplm": _BERT,
    "megatron_bert": _BERT,
    # The head concatenates two weights into one product.
    "mobilebert": Plan(BERT, _BERT_LOCAL, cut_vocabulary=False),
    "modernbert": _MODERN,
    "modernvbert": replace(_MODERN, first={"text_model.embeddings": ReceivedTokens}),
    "mra": replace(_BERT, head_losses={"MraForTokenClassification": classes_of_tokens}),
    "nomic_bert": _LLAMA,
    "nystromformer": Plan(
        {**BERT, "self.conv.weight": "first_dim"},
        {**_BERT_LOCAL, "self.conv": ("groups", "in_channels", "out_channels")},
    ),
    "rembert": _BERT,
    "roc_bert": replace(_BERT, head_losses={"RoCBertForPreTraining": own_loss}),
    "roformer": Plan(BERT, _BERT_LOCAL, every=("encoder.embed_positions",)),
    "squeezebert": Plan({}, changes_shapes=True, calls_forward=True),  # its projections are grouped convolutions
    "tapas": replace(_BERT, head_losses={"TapasForQuestionAnswering": own_loss}),
    "visual_bert": replace(
        _BERT,
        head_losses=dict.fromkeys(("VisualBertForPreTraining", "VisualBertForQuestionAnswering"), own_loss),
    ),
    "xlm": Plan(**_XLM, head_losses={"XLMWithLMHeadModel": masked_lm, "XLMForQuestionAnswering": own_loss}),
    "xlm_roberta_xl": replace(_BERT, head_losses={"XLMRobertaXLForTokenClassification": classes_of_tokens}),
    "xlnet": Plan(
        {"ff.layer_1": "colwise", "ff.layer_2": "rowwise"},
        head_losses={"XLNetLMHeadModel": masked_lm, "XLNetForQuestionAnswering": own_loss},
    ),
    "xmod": _BERT,
    "yoso": replace(_BERT, head_losses={"YosoForTokenClassification": classes_of_tokens}),
}
