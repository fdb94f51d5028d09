"""BERT and RoBERTa."""

from __future__ import annotations

from collections.abc import Mapping

from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.rules import ShardingRules
from shardformer.stages.stage import Received, StageLayout


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
