"""BERT, RoBERTa and the families with their module names: ELECTRA, DistilBERT and others."""

from __future__ import annotations

from collections.abc import Mapping

from shardformer.attention.own_attention import MPNetRegistryAttention
from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.loss.text import causal_lm, recurring_spans, replaced_tokens
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.rules import ShardingRules
from shardformer.stages.stage import IdentityPlaceholder, Received, StageLayout


class BertPolicy(Policy):
    """Policy for BERT. Its layers normalise after each tensor-parallel region, so norms are between regions."""

    family, prefix = "bert", "Bert"
    heads = (
        "Model",
        "ForPreTraining",
        "LMHeadModel",
        "ForMaskedLM",
        "ForNextSentencePrediction",
        "ForSequenceClassification",
        "ForMultipleChoice",
        "ForTokenClassification",
        "ForQuestionAnswering",
    )
    stages = StageLayout(layers="encoder.layer", first={"embeddings": Received}, last=("pooler",))
    supports_sequence_parallel = True
    head_losses = USUAL_HEAD_LOSSES

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        rules = ShardingRules(self.shard_config)
        heads = self.model.config.num_attention_heads
        attention = rules.column("query", "key", "value", num_heads=heads)
        cross_attention = [*rules.column("query", num_heads=heads), *rules.column("key", "value", num_heads=heads)]
        output = [*rules.layer_norm("LayerNorm"), *rules.residual_dropout("dropout")]
        local_heads = {
            "num_attention_heads": heads // self.tp_size,
            "all_head_size": self.model.config.hidden_size // self.tp_size,
        }
        return {
            f"{self.prefix}Embeddings": ModulePolicyDescription(sub_module_replacement=rules.vocab("word_embeddings")),
            f"{self.prefix}SelfAttention": ModulePolicyDescription(local_heads, [], attention, gathers_sequence=True),
            f"{self.prefix}CrossAttention": ModulePolicyDescription(
                local_heads, [], cross_attention, gathers_sequence=True
            ),
            f"{self.prefix}SelfOutput": ModulePolicyDescription(
                sub_module_replacement=[*rules.row("dense", num_heads=heads), *output],
            ),
            f"{self.prefix}Intermediate": ModulePolicyDescription(
                sub_module_replacement=rules.column("dense"),
                gathers_sequence=True,
            ),
            f"{self.prefix}Output": ModulePolicyDescription(sub_module_replacement=[*rules.row("dense"), *output]),
            f"{self.prefix}LMPredictionHead": ModulePolicyDescription(sub_module_replacement=rules.head("decoder")),
        }


class RobertaPolicy(BertPolicy):
    """Policy for RoBERTa."""

    family, prefix = "roberta", "Roberta"
    heads = (
        "Model",
        "ForCausalLM",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForMultipleChoice",
        "ForTokenClassification",
        "ForQuestionAnswering",
    )
    supports_sequence_parallel = True
    head_losses = USUAL_HEAD_LOSSES

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return BERT's table with RoBERTa's head."""
        table = dict(super().module_policy())
        table[f"{self.prefix}LMHead"] = table.pop(f"{self.prefix}LMPredictionHead")
        return table


class ErniePolicy(BertPolicy):
    """Policy for ERNIE."""

    family, prefix = "ernie", "Ernie"
    heads = (
        "Model",
        "ForPreTraining",
        "ForCausalLM",
        "ForMaskedLM",
        "ForNextSentencePrediction",
        "ForSequenceClassification",
        "ForMultipleChoice",
        "ForTokenClassification",
        "ForQuestionAnswering",
    )
    head_losses = USUAL_HEAD_LOSSES


class ElectraPolicy(BertPolicy):
    """Policy for ELECTRA: the discriminator, and the language-model heads of the generator."""

    family, prefix = "electra", "Electra"
    heads = (
        "Model",
        "ForPreTraining",
        "ForCausalLM",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForMultipleChoice",
        "ForTokenClassification",
        "ForQuestionAnswering",
    )
    stages = StageLayout(
        layers="encoder.layer", first={"embeddings": Received, "embeddings_project": IdentityPlaceholder}
    )
    supports_sequence_parallel = True
    head_losses = {**USUAL_HEAD_LOSSES, "ForPreTraining": replaced_tokens}

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        table = dict(super().module_policy())
        del table["ElectraLMPredictionHead"]
        rules = ShardingRules(self.shard_config)
        for head in ("ForMaskedLM", "ForCausalLM"):
            table[f"Electra{head}"] = ModulePolicyDescription(sub_module_replacement=rules.head("generator_lm_head"))
        return table


class XLMRobertaPolicy(RobertaPolicy):
    """Policy for XLM-RoBERTa."""

    family, prefix = "xlm_roberta", "XLMRoberta"
    head_losses = USUAL_HEAD_LOSSES


class CamembertPolicy(RobertaPolicy):
    """Policy for CamemBERT."""

    family, prefix = "camembert", "Camembert"
    head_losses = USUAL_HEAD_LOSSES


class Data2VecTextPolicy(RobertaPolicy):
    """Policy for data2vec for text."""

    family, prefix = "data2vec_text", "Data2VecText"
    module = "transformers.models.data2vec.modeling_data2vec_text"
    head_losses = USUAL_HEAD_LOSSES


class RobertaPreLayerNormPolicy(RobertaPolicy):
    """Policy for RoBERTa-PreLayerNorm, which has a norm before each region and one after the layers."""

    family, prefix = "roberta_prelayernorm", "RobertaPreLayerNorm"
    stages = StageLayout(layers="encoder.layer", first={"embeddings": Received}, last=("LayerNorm", "pooler"))
    supports_sequence_parallel = True
    head_losses = USUAL_HEAD_LOSSES

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        rules = ShardingRules(self.shard_config)
        heads = self.model.config.num_attention_heads
        dropout = rules.residual_dropout("dropout")
        return {
            **super().module_policy(),
            f"{self.prefix}Attention": ModulePolicyDescription(sub_module_replacement=rules.layer_norm("LayerNorm")),
            f"{self.prefix}SelfOutput": ModulePolicyDescription(
                sub_module_replacement=[*rules.row("dense", num_heads=heads), *dropout]
            ),
            f"{self.prefix}Intermediate": ModulePolicyDescription(
                sub_module_replacement=[*rules.layer_norm("LayerNorm"), *rules.column("dense")], gathers_sequence=True
            ),
            f"{self.prefix}Output": ModulePolicyDescription(sub_module_replacement=[*rules.row("dense"), *dropout]),
        }


class BertGenerationPolicy(BertPolicy):
    """Policy for BertGeneration: the encoder, and the decoder, which is a causal language model."""

    family, prefix = "bert_generation", "BertGeneration"
    heads = ("Encoder", "Decoder")
    supports_sequence_parallel = True
    head_losses = {**USUAL_HEAD_LOSSES, "Decoder": causal_lm}

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        table = dict(super().module_policy())
        table["BertGenerationOnlyLMHead"] = table.pop("BertGenerationLMPredictionHead")
        return table


class LayoutLMPolicy(BertPolicy):
    """Policy for LayoutLM. Only its embeddings use the boxes on the page."""

    family, prefix = "layoutlm", "LayoutLM"
    heads = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    head_losses = USUAL_HEAD_LOSSES


class SplinterPolicy(BertPolicy):
    """Policy for Splinter, whose heads predict spans."""

    family, prefix = "splinter", "Splinter"
    heads = ("Model", "ForQuestionAnswering", "ForPreTraining")
    stages = StageLayout(layers="encoder.layer", first={"embeddings": Received})
    supports_sequence_parallel = True
    head_losses = {**USUAL_HEAD_LOSSES, "ForPreTraining": recurring_spans}

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        table = dict(super().module_policy())
        del table["SplinterLMPredictionHead"]
        return table


class MPNetPolicy(BertPolicy):
    """Policy for MPNet. Every stage holds the position biases, which are computed once and sharded by heads."""

    family, prefix = "mpnet", "MPNet"
    own_attention = {"MPNetSelfAttention": MPNetRegistryAttention}
    heads = (
        "Model",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForMultipleChoice",
        "ForTokenClassification",
        "ForQuestionAnswering",
    )
    stages = StageLayout(
        layers="encoder.layer",
        first={"embeddings": Received},
        every=("encoder.relative_attention_bias",),
        last=("pooler",),
        tuple_output=True,
    )
    supports_sequence_parallel = True
    head_losses = USUAL_HEAD_LOSSES

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        table = dict(super().module_policy())
        rules = ShardingRules(self.shard_config)
        heads = self.model.config.num_attention_heads
        table["MPNetSelfAttention"] = ModulePolicyDescription(
            {"all_head_size": self.model.config.hidden_size // self.tp_size},
            sub_module_replacement=[
                *rules.column("q", "k", "v", num_heads=heads),
                *rules.row("o", num_heads=heads),
                *rules.region_dropout("dropout"),
            ],
            gathers_sequence=True,
        )
        table["MPNetAttention"] = ModulePolicyDescription(
            sub_module_replacement=[*rules.layer_norm("LayerNorm"), *rules.residual_dropout("dropout")]
        )
        table["MPNetEncoder"] = ModulePolicyDescription(
            sub_module_replacement=rules.head_sharded_embedding("relative_attention_bias")
        )
        table["MPNetLMHead"] = table.pop("MPNetLMPredictionHead")
        return table


class DistilBertPolicy(Policy):
    """Policy for DistilBERT."""

    family, prefix = "distilbert", "DistilBert"
    heads = (
        "Model",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForQuestionAnswering",
        "ForTokenClassification",
        "ForMultipleChoice",
    )
    stages = StageLayout(layers="transformer.layer", first={"embeddings": Received})
    supports_sequence_parallel = True
    head_losses = USUAL_HEAD_LOSSES

    def head_counts(self) -> Mapping[str, int]:
        """Return the head count by DistilBERT's name for it."""
        return {"n_heads": self.model.config.n_heads}

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        rules = ShardingRules(self.shard_config)
        heads = self.model.config.n_heads
        return {
            "Embeddings": ModulePolicyDescription(sub_module_replacement=rules.vocab("word_embeddings")),
            "DistilBertSelfAttention": ModulePolicyDescription(
                sub_module_replacement=[
                    *rules.column("q_lin", "k_lin", "v_lin", num_heads=heads),
                    *rules.row("out_lin", num_heads=heads),
                ],
                gathers_sequence=True,
            ),
            "FFN": ModulePolicyDescription(
                sub_module_replacement=[*rules.column("lin1"), *rules.row("lin2"), *rules.residual_dropout("dropout")],
                gathers_sequence=True,
            ),
            "TransformerBlock": ModulePolicyDescription(
                sub_module_replacement=rules.layer_norm("sa_layer_norm", "output_layer_norm")
            ),
            "DistilBertForMaskedLM": ModulePolicyDescription(sub_module_replacement=rules.head("vocab_projector")),
        }
