"""ViT, and DeiT, which has the same module names."""

from __future__ import annotations

from collections.abc import Mapping

from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.rules import ShardingRules
from shardformer.stages.stage import ReceivedPatches, StageLayout


class ViTPolicy(Policy):
    """Policy for ViT. Its layers normalise before each tensor-parallel region."""

    family, prefix = "vit", "ViT"
    heads = ("Model", "ForImageClassification", "ForMaskedImageModeling")
    uneven_heads = True
    stages = StageLayout(layers="layers", first={"embeddings": ReceivedPatches}, last=("layernorm", "pooler"))
    supports_sequence_parallel = True
    head_losses = USUAL_HEAD_LOSSES

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        rules = ShardingRules(self.shard_config)
        heads = self.model.config.num_attention_heads
        attention = [
            *rules.column("q_proj", "k_proj", "v_proj", num_heads=heads),
            *rules.row("o_proj", num_heads=heads),
        ]
        between_regions = [
            *rules.layer_norm("layernorm_before", "layernorm_after"),
            *rules.residual_dropout("dropout"),
        ]
        return {
            f"{self.prefix}Attention": ModulePolicyDescription(sub_module_replacement=attention, gathers_sequence=True),
            f"{self.prefix}MLP": ModulePolicyDescription(
                sub_module_replacement=[*rules.column("fc1"), *rules.row("fc2")], gathers_sequence=True
            ),
            f"{self.prefix}Layer": ModulePolicyDescription(sub_module_replacement=between_regions),
        }


class DeiTPolicy(ViTPolicy):
    """Policy for DeiT. Its distillation token is an additional token of the embedding."""

    family, prefix = "deit", "DeiT"
    heads = (*ViTPolicy.heads, "ForImageClassificationWithTeacher")
    head_losses = USUAL_HEAD_LOSSES
