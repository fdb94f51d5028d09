"""Swin and SwinV2: windows of an image's patches, in several lists of layers with a merging of patches between them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.rules import ShardingRules
from shardformer.stages.stage import StageLayout, StagePlaceholder


class ReceivedGrid(StagePlaceholder):
    """Stands for the embedding: patches of the right shape, [rows, height * width, features], and their grid.

    Every list of layers reshapes what it gets by the grid, so that shapes have to fit up to the layers of this stage.
    """

    def __init__(self, patch_size: int, features: int) -> None:
        super().__init__()
        self.patch_size, self.features = patch_size, features

    def forward(self, pixel_values: Tensor, **kwargs: Any) -> tuple[Tensor, tuple[int, int]]:
        height, width = (-(-side // self.patch_size) for side in pixel_values.shape[-2:])
        return pixel_values.new_zeros(len(pixel_values), height * width, self.features), (height, width)


class MergedPatches(StagePlaceholder):
    """Stands for the merging of patches: four become one of twice the features."""

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        height, width = ((side + 1) // 2 for side in grid)
        return x.new_zeros(len(x), height * width, 2 * x.shape[-1])


class SwinPolicy(Policy):
    """Swin with any of its heads. Each list of layers has a number of attention heads of its own."""

    family, prefix = "swin", "Swin"
    heads = ("Model", "ForImageClassification", "ForMaskedImageModeling", "Backbone")
    layer_outputs = 2
    supports_sequence_parallel = True
    writes_usual_losses = True

    @property
    def stages(self) -> StageLayout:
        config = self.model.config
        embedding = {"embeddings": partial(ReceivedGrid, config.patch_size, config.embed_dim)}
        layout = None
        for index in reversed(range(len(config.depths))):
            layout = StageLayout(
                layers=f"encoder.layers.{index}.blocks",
                first={f"encoder.layers.{index - 1}.downsample": MergedPatches} if index else embedding,
                last=() if layout else ("layernorm", "pooler"),
                tuple_output=self.layer_outputs,
                next_layers=layout,
            )
        return layout

    def head_counts(self) -> Mapping[str, int]:
        return {f"num_heads[{index}]": count for index, count in enumerate(self.model.config.num_heads)}

    def check(self) -> list[str]:
        problems = super().check()
        if self.shard_config.sequence is not None:
            problems.append(
                "enable_sequence_parallelism=True does not support the windows of "
                f"{type(self.model).__name__}; use enable_sequence_parallelism=False"
            )
        return problems + self.check_hidden_states((f"{self.prefix}Backbone",))

    def preprocess(self) -> nn.Module:
        # A pipeline stage may end inside of a list of layers, which then is not recomputed as a whole; its layers are.
        if self.shard_config.stage_manager.num_stages > 1:
            for stage in self._lists():
                stage.gradient_checkpointing = False
        return self.model

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        rules = ShardingRules(self.shard_config)
        return {
            "SwinAttention": ModulePolicyDescription(
                sub_module_replacement=[*rules.column("q_proj", "k_proj", "v_proj"), *rules.row("o_proj")]
            ),
            "SwinRelativePositionBias": ModulePolicyDescription(
                param_replacement=rules.heads_of_parameter("relative_position_bias_table", dim=1)
            ),
            "SwinMLP": ModulePolicyDescription(sub_module_replacement=[*rules.column("fc1"), *rules.row("fc2")]),
            "SwinLayer": ModulePolicyDescription(
                sub_module_replacement=rules.layer_norm("layernorm_before", "layernorm_after")
            ),
        }

    def _lists(self) -> list[nn.Module]:
        """The modules of transformers that each have a list of layers."""
        return [module for module in self.model.modules() if type(module).__name__ == f"{self.prefix}Stage"]


class Swinv2Policy(SwinPolicy):
    """SwinV2: a learned scale for each head, and biases of relative positions from a small MLP."""

    family, prefix = "swinv2", "Swinv2"
    layer_outputs = 1
    supports_sequence_parallel = True
    writes_usual_losses = True

    def check(self) -> list[str]:
        problems = super().check()
        if self.shard_config.stage_manager.num_stages > 1 and any(
            each.gradient_checkpointing for each in self._lists()
        ):
            problems.append(
                "gradient_checkpointing='full' recomputes whole lists of layers of "
                f"{type(self.model).__name__}, which pipeline stages cut; use gradient_checkpointing=None or pp_size=1"
            )
        return problems

    def preprocess(self) -> nn.Module:
        return self.model

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        rules = ShardingRules(self.shard_config)
        attention = [
            *rules.column("query", "key", "value"),
            *rules.column("continuous_position_bias_mlp.2"),
            *rules.replicated("continuous_position_bias_mlp.0"),
            *rules.region_dropout("dropout"),
        ]
        return {
            "Swinv2SelfAttention": ModulePolicyDescription(
                param_replacement=[*rules.heads_of_parameter("logit_scale", dim=0), self._count_local_heads],
                sub_module_replacement=attention,
            ),
            "Swinv2SelfOutput": ModulePolicyDescription(sub_module_replacement=rules.row("dense")),
            "Swinv2Intermediate": ModulePolicyDescription(sub_module_replacement=rules.column("dense")),
            "Swinv2Output": ModulePolicyDescription(sub_module_replacement=rules.row("dense")),
            "Swinv2Layer": ModulePolicyDescription(
                sub_module_replacement=rules.layer_norm("layernorm_before", "layernorm_after")
            ),
        }

    def postprocess(self) -> nn.Module:
        # The coordinates are a buffer, and buffers keep their precision where parameters are cast to 16 bit.
        for module in self.model.modules():
            if type(module).__name__ == "Swinv2SelfAttention":
                module.continuous_position_bias_mlp.register_forward_pre_hook(_cast_to_weights)
        return self.model

    def _count_local_heads(self, attention: nn.Module) -> None:
        # Not an attribute_replacement: the lists of layers differ in their heads.
        attention.num_attention_heads //= self.tp_size
        attention.all_head_size //= self.tp_size


def _cast_to_weights(mlp: nn.Sequential, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].to(mlp[0].weight.dtype),)
