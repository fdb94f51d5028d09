"""ViT, and DeiT and BEiT, which have the same module names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.loss.perception import masked_visual_tokens
from shardformer.policies.base import ModulePolicyDescription
from shardformer.policies.table import GATHERS, HEADS, Entry, TablePolicy, rules, variant
from shardformer.stages.stage import Received, ReceivedPatches, StageLayout

_LAYER = [rules.layer_norm("layernorm_before", "layernorm_after"), rules.residual_dropout("dropout")]


class ViTPolicy(TablePolicy):
    """Policy for ViT. Its layers normalise before each tensor-parallel region."""

    family, prefix = "vit", "ViT"
    heads = ("Model", "ForImageClassification", "ForMaskedImageModeling")
    uneven_heads = True
    stages = StageLayout(layers="layers", first={"embeddings": ReceivedPatches}, last=("layernorm", "pooler"))
    supports_sequence_parallel = True
    table: Mapping[str, Sequence[Entry]] = {
        "{}Attention": [
            GATHERS,
            rules.column("q_proj", "k_proj", "v_proj", num_heads=HEADS),
            rules.row("o_proj", num_heads=HEADS),
        ],
        "{}MLP": [GATHERS, rules.column("fc1"), rules.row("fc2")],
        "{}Layer": _LAYER,
    }


# Its distillation token is an additional token of the embedding.
DeiTPolicy = variant(ViTPolicy, "deit", "DeiT", heads=(*ViTPolicy.heads, "ForImageClassificationWithTeacher"))


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

    table = {
        **ViTPolicy.table,
        "{}Layer": [rules.module_parameters("lambda_1", "lambda_2"), *_LAYER],
        "BeitRelativePositionBias": [rules.heads_of_parameter("relative_position_bias_table", dim=1)],
        "BeitForMaskedImageModeling": [rules.head("lm_head")],
    }

    def module_policy(self) -> Mapping[str | type[nn.Module], ModulePolicyDescription]:
        """Return the table, with batch norms."""
        batch_norm = ModulePolicyDescription(method_replacement={"forward": _batch_norm})
        return {**super().module_policy(), "BatchNorm2d": batch_norm}


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
