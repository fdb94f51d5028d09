"""DeBERTa-v2 and v3, whose disentangled attention also projects a table of relative positions."""

from __future__ import annotations

from collections.abc import Mapping

from shardformer.attention.own_attention import DebertaRegistryAttention
from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.rules import ShardingRules
from shardformer.stages.stage import Received, StageLayout


class DebertaV2Policy(Policy):
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
    head_losses = USUAL_HEAD_LOSSES

    @property
    def stages(self) -> StageLayout:
        """The stage layout; the newer head reads the embedding's weight on the last stage."""
        return StageLayout(
            layers="encoder.layer",
            first={"embeddings": Received, "encoder.conv": Received},
            every=("encoder.rel_embeddings", "encoder.LayerNorm"),
            last=("embeddings.word_embeddings",) if self._reads_embedding else (),
            tuple_output=2,
        )

    @property
    def _reads_embedding(self) -> bool:
        """Whether the model has the newer head, which uses the embedding's weight and a bias of the full vocabulary."""
        return hasattr(self.model, "lm_predictions")

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        rules = ShardingRules(self.shard_config)
        config = self.model.config
        heads = config.num_attention_heads
        # With a shared key, query and key also read the table of positions; the value does not.
        value_reads = "value_proj" if getattr(config, "share_att_key", False) else "query_proj"
        output = [*rules.layer_norm("LayerNorm"), *rules.residual_dropout("dropout")]
        return {
            "DebertaV2Embeddings": ModulePolicyDescription(
                sub_module_replacement=[] if self._reads_embedding else rules.vocab("word_embeddings")
            ),
            "DisentangledSelfAttention": ModulePolicyDescription(
                {"num_attention_heads": heads // self.tp_size},
                sub_module_replacement=[
                    *rules.column("query_proj", "key_proj", num_heads=heads),
                    *rules.column("value_proj", num_heads=heads, reads=value_reads),
                    *rules.column("pos_key_proj?", num_heads=heads),
                    *rules.column("pos_query_proj?", num_heads=heads),
                    *rules.region_dropout("dropout"),
                ],
                gathers_sequence=True,
            ),
            "DebertaV2SelfOutput": ModulePolicyDescription(
                sub_module_replacement=[*rules.row("dense", num_heads=heads), *output]
            ),
            "DebertaV2Intermediate": ModulePolicyDescription(
                sub_module_replacement=rules.column("dense"), gathers_sequence=True
            ),
            "DebertaV2Output": ModulePolicyDescription(sub_module_replacement=[*rules.row("dense"), *output]),
            "LegacyDebertaV2LMPredictionHead": ModulePolicyDescription(sub_module_replacement=rules.head("decoder")),
        }
