"""GPT-2."""

from __future__ import annotations

from collections.abc import Mapping

from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.rules import ShardingRules
from shardformer.stages.stage import IdentityPlaceholder, Received, StageLayout, ZeroEmbedding


class GPT2Policy(Policy):
    """Policy for GPT-2, with a fused `Conv1D` for query, key and value, each sharded independently."""

    family, prefix = "gpt2", "GPT2"
    heads = (
        "Model",
        "LMHeadModel",
        "DoubleHeadsModel",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
    )
    stages = StageLayout(
        layers="h", first={"wte": Received, "wpe": ZeroEmbedding, "drop": IdentityPlaceholder}, last=("ln_f",)
    )
    supports_sequence_parallel = True
    head_losses = USUAL_HEAD_LOSSES

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        rules = ShardingRules(self.shard_config)
        config = self.model.config
        heads = config.num_attention_heads
        local_size = config.hidden_size // self.tp_size
        head = ModulePolicyDescription(sub_module_replacement=rules.head("lm_head"))
        return {
            "GPT2Model": ModulePolicyDescription(sub_module_replacement=rules.vocab("wte")),
            "GPT2Attention": ModulePolicyDescription(
                {"num_heads": heads // self.tp_size, "split_size": local_size, "embed_dim": local_size},
                sub_module_replacement=[
                    *rules.column("c_attn", num_heads=heads, part_size=config.hidden_size),
                    *rules.column("q_attn?", num_heads=heads),
                    *rules.row("c_proj", num_heads=heads),
                    *rules.residual_dropout("resid_dropout"),
                ],
                gathers_sequence=True,
            ),
            "GPT2MLP": ModulePolicyDescription(
                sub_module_replacement=[
                    *rules.column("c_fc"),
                    *rules.row("c_proj"),
                    *rules.residual_dropout("dropout"),
                ],
                gathers_sequence=True,
            ),
            "GPT2Block": ModulePolicyDescription(
                sub_module_replacement=rules.layer_norm("ln_1", "ln_2", "ln_cross_attn?")
            ),
            "GPT2LMHeadModel": head,
            "GPT2DoubleHeadsModel": head,
        }
