"""ViT, and DeiT and BEiT, which have the same module names."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.loss.perception import masked_visual_tokens
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.rules import ShardingRules
from shardformer.stages.stage import Received, ReceivedPatches, StageLayout


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


# Heads that read hidden states -> what `out_indices` calls the output of the embeddings.
_FIRST_HIDDEN_STATE = {"BeitForSemanticSegmentation": 1, "BeitBackbone": 0}


class BeitPolicy(ViTPolicy):
    """Policy for BEiT: the modules of ViT, with relative position biases per layer or shared by all layers.

    The batch norms of the segmentation head normalise each micro-batch of a rank separately, as in any training that
    splits its batches.
    """

    family, prefix = "beit", "Beit"
    heads = ("Model", "ForImageClassification", "ForMaskedImageModeling", "ForSemanticSegmentation", "Backbone")
    supports_sequence_parallel = True
    head_losses = {**USUAL_HEAD_LOSSES, "ForMaskedImageModeling": masked_visual_tokens}

    @property
    def stages(self) -> StageLayout:
        """Return the stage layout; the hidden states that a head reads of earlier stages travel to the last one."""
        layout = StageLayout(
            layers="layers",
            first={"embeddings": Received},
            every=("shared_position_bias",),
            last=("layernorm", "pooler"),
        )
        first = _FIRST_HIDDEN_STATE.get(type(self.model).__name__)
        if first is None:
            return layout
        return layout.keeping_hidden_states([number - first for number in self.model.config.out_indices])

    def check(self) -> list[str]:
        """Return why the model cannot be sharded; some heads read the outputs of all layers."""
        return [*super().check(), *self.check_hidden_states(_FIRST_HIDDEN_STATE)]

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return ViT's table, with layer scales, position biases, the image head and batch norms."""
        rules = ShardingRules(self.shard_config)
        table = dict(super().module_policy())
        table["BeitLayer"].param_replacement.extend(rules.module_parameters("lambda_1", "lambda_2"))
        table["BeitRelativePositionBias"] = ModulePolicyDescription(
            param_replacement=rules.heads_of_parameter("relative_position_bias_table", dim=1)
        )
        table["BeitForMaskedImageModeling"] = ModulePolicyDescription(sub_module_replacement=rules.head("lm_head"))
        table["BatchNorm2d"] = ModulePolicyDescription(method_replacement={"forward": _batch_norm})
        return table


def _batch_norm(self: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Apply batch norm to [rows, channels, height, width] in the precision of the running statistics.

    The statistics are buffers and keep their precision when parameters are cast to 16 bits, and no PyTorch kernel
    accepts this mix of dtypes.
    """
    if self.training:
        self.num_batches_tracked.add_(1)
    dtype = self.running_mean.dtype
    weight, bias = self.weight.to(dtype), self.bias.to(dtype)
    statistics = (self.running_mean, self.running_var)
    return F.batch_norm(x.to(dtype), *statistics, weight, bias, self.training, self.momentum, self.eps).to(x.dtype)
