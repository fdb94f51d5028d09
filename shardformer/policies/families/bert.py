"""BERT, RoBERTa and the families with their module names: ELECTRA, DistilBERT and others."""

from __future__ import annotations

from shardformer.attention.own_attention import MPNetRegistryAttention
from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.loss.text import causal_lm, recurring_spans, replaced_tokens
from shardformer.policies.table import GATHERS, HEADS, TablePolicy, local, rules, variant
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
