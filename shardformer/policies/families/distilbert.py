"""DistilBERT."""

from __future__ import annotations

from collections.abc import Mapping

from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.rules import ShardingRules
from shardformer.stages.stage import Received, StageLayout


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
