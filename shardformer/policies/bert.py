"""BERT."""

from __future__ import annotations

from collections.abc import Mapping

from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.shorthand import Shorthand
from shardformer.stage import Received, StageLayout


class BertPolicy(Policy):
    """All heads of BERT; its layers normalise after each region, so norms sit between the regions."""

    stages = StageLayout(layers="encoder.layer", first={"embeddings": Received}, last=("pooler",))

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        cut = Shorthand(self.shard_config)
        heads = self.model.config.num_attention_heads
        attention = cut.column("query", "key", "value", num_heads=heads)
        cross_attention = [*cut.column("query", num_heads=heads), *cut.column("key", "value", num_heads=heads)]
        output = [*cut.layer_norm("LayerNorm"), *cut.residual_dropout("dropout")]
        local_heads = {
            "num_attention_heads": heads // self.tp_size,
            "all_head_size": self.model.config.hidden_size // self.tp_size,
        }
        return {
            "BertEmbeddings": ModulePolicyDescription(sub_module_replacement=cut.vocab("word_embeddings")),
            "BertSelfAttention": ModulePolicyDescription(local_heads, [], attention, gathers_sequence=True),
            "BertCrossAttention": ModulePolicyDescription(local_heads, [], cross_attention, gathers_sequence=True),
            "BertSelfOutput": ModulePolicyDescription(
                sub_module_replacement=[*cut.row("dense", num_heads=heads), *output]
            ),
            "BertIntermediate": ModulePolicyDescription(
                sub_module_replacement=cut.column("dense"), gathers_sequence=True
            ),
            "BertOutput": ModulePolicyDescription(sub_module_replacement=[*cut.row("dense"), *output]),
            "BertLMPredictionHead": ModulePolicyDescription(sub_module_replacement=cut.head("decoder")),
        }
