"""ChatGLM2, either from this package or from the remote code of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from shardformer.layers import ColumnParallelLinear, MultiQueryLinear
from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.policies.base import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from shardformer.policies.rules import ShardingRules
from shardformer.shard_spec import Part
from shardformer.stages.stage import Received, StageLayout
from shardformer.utils.structure import divisors_phrase


class ChatGLM2Policy(Policy):
    """Policy for ChatGLM2: fused query, key and value with fewer key/value heads, and fused gate and up projections."""

    family, prefix = "chatglm2", "ChatGLM"
    module = "shardformer.models.chatglm2.modeling_chatglm"
    heads = ("Model", "ForConditionalGeneration", "ForSequenceClassification")
    stages = StageLayout(
        layers="encoder.layers",
        first={"embedding": Received},
        every=("rotary_pos_emb",),
        last=("encoder.final_layernorm", "output_layer"),
    )
    supports_sequence_parallel = True
    head_losses = USUAL_HEAD_LOSSES

    def check(self) -> list[str]:
        """Return why the model cannot be sharded; key/value groups must fit the number of ranks."""
        groups = self.model.config.num_key_value_heads
        if groups % self.tp_size and self.tp_size % groups:
            clash = f"tp_size={self.tp_size} neither divides multi_query_group_num={groups} nor is a multiple of it"
            return [*super().check(), f"{clash}; use {divisors_phrase(groups)}"]
        return super().check()

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        rules = ShardingRules(self.shard_config)
        config = self.model.config
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        local_groups = max(1, groups // self.tp_size)
        norms = rules.rms_norm if config.rmsnorm else rules.layer_norm
        return {
            "ChatGLMEmbedding": ModulePolicyDescription(sub_module_replacement=rules.vocab("word_embeddings")),
            "ChatGLMSelfAttention": ModulePolicyDescription(
                {
                    "num_heads": heads // self.tp_size,
                    "num_groups": local_groups,
                    "num_key_value_groups": heads // self.tp_size // local_groups,
                },
                sub_module_replacement=[self._fused_projection(), *rules.row("dense", num_heads=heads)],
                gathers_sequence=True,
            ),
            "ChatGLMMLP": ModulePolicyDescription(
                sub_module_replacement=[
                    *rules.column("dense_h_to_4h", part_size=config.ffn_hidden_size),
                    *rules.row("dense_4h_to_h"),
                ],
                gathers_sequence=True,
            ),
            "ChatGLMBlock": ModulePolicyDescription(
                sub_module_replacement=[
                    *norms("input_layernorm", "post_attention_layernorm"),
                    *rules.residual_dropout("attention_dropout", "mlp_dropout"),
                ]
            ),
            "ChatGLMModel": ModulePolicyDescription(sub_module_replacement=rules.head("output_layer")),
        }

    def _fused_projection(self) -> SubModuleReplacementDescription:
        config = self.model.config
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.kv_channels
        gathered = {"input_is_gathered": self.shard_config.gathers_sum}
        if not config.multi_query_attention:
            options = {"num_heads": heads, **gathered}
        elif groups % self.tp_size == 0:
            options = {"parts": tuple(Part(count * size, size) for count in (heads, groups, groups)), **gathered}
        else:
            options = {"num_heads": heads, "num_groups": groups, "head_dim": size, **gathered}
            return SubModuleReplacementDescription("query_key_value", MultiQueryLinear, options)
        return SubModuleReplacementDescription("query_key_value", ColumnParallelLinear, options)
