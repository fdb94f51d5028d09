"""Swin and SwinV2: windowed attention over image patches, in several layer lists with patch merging between them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardformer.attention.own_attention import Swinv2RegistryAttention
from shardformer.policies.table import TablePolicy, own, rules
from shardformer.stages.stage import StageLayout, StagePlaceholder


class ReceivedGrid(StagePlaceholder):
    """Placeholder for the embedding; returns dummy patches [rows, height * width, features] and their grid.

    Every layer list reshapes its input by the grid, so shapes must be right up to the layers of this stage.
    """

    def __init__(self, patch_size: int, features: int) -> None:
        super().__init__()
        self.patch_size, self.features = patch_size, features

    def forward(self, pixel_values: Tensor, **kwargs: Any) -> tuple[Tensor, tuple[int, int]]:
        """Return zeros [batch, patches, features] and the grid of patches."""
        height, width = (-(-side // self.patch_size) for side in pixel_values.shape[-2:])
        return pixel_values.new_zeros(len(pixel_values), height * width, self.features), (height, width)


class MergedPatches(StagePlaceholder):
    """Placeholder for patch merging, which turns four patches into one with twice the features."""

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return zeros [batch, patches / 4, 2 * features]."""
        height, width = ((side + 1) // 2 for side in grid)
        return x.new_zeros(len(x), height * width, 2 * x.shape[-1])


_NORMS = [rules.layer_norm("layernorm_before", "layernorm_after")]


class SwinPolicy(TablePolicy):
    """Policy for Swin. Each layer list has its own number of attention heads."""

    family, prefix = "swin", "Swin"
    heads = ("Model", "ForImageClassification", "ForMaskedImageModeling", "Backbone")
    layer_outputs = 2
    supports_sequence_parallel = True
    supports_ulysses = False  # parts of sequences are not made of whole windows

    @property
    def stages(self) -> StageLayout:
        """The stage layout: a chain of one layer list per resolution."""
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
        """Return the head count of each layer list."""
        return {f"num_heads[{index}]": count for index, count in enumerate(self.model.config.num_heads)}

    def check(self) -> list[str]:
        """Return why the model cannot be sharded; windows and backbones read whole images."""
        problems = super().check()
        if self.shard_config.sequence is not None:
            problems.append(
                "enable_sequence_parallelism=True does not support the windows of "
                f"{type(self.model).__name__}; use enable_sequence_parallelism=False"
            )
        return problems + self.check_hidden_states((f"{self.prefix}Backbone",))

    def preprocess(self) -> nn.Module:
        """Turn off activation checkpointing of whole layer lists if the model is split into stages."""
        # A pipeline stage may end inside a layer list, so checkpoint single layers instead of the whole list.
        if self.shard_config.stage_manager.num_stages > 1:
            for stage in self._lists():
                stage.gradient_checkpointing = False
        return self.model

    table = {
        "SwinAttention": [rules.column("q_proj", "k_proj", "v_proj"), rules.row("o_proj")],
        "SwinRelativePositionBias": [rules.heads_of_parameter("relative_position_bias_table", dim=1)],
        "SwinMLP": [rules.column("fc1"), rules.row("fc2")],
        "SwinLayer": _NORMS,
    }

    def _lists(self) -> list[nn.Module]:
        """Return the modules that each contain a layer list (`SwinStage`, `Swinv2Stage` in transformers)."""
        return [module for module in self.model.modules() if type(module).__name__ == f"{self.prefix}Stage"]

    def _count_local_heads(self, attention: nn.Module) -> None:
        # Not attributes of the table, because the layer lists have different numbers of heads.
        attention.num_attention_heads //= self.tp_size
        attention.all_head_size //= self.tp_size


class Swinv2Policy(SwinPolicy):
    """Policy for SwinV2: a learned scale per head, and relative position biases computed by a small MLP."""

    family, prefix = "swinv2", "Swinv2"
    own_attention = {"Swinv2SelfAttention": Swinv2RegistryAttention}
    layer_outputs = 1
    table = {
        "Swinv2SelfAttention": [
            rules.heads_of_parameter("logit_scale", dim=0),
            own("_count_local_heads"),
            rules.column("query", "key", "value"),
            rules.column("continuous_position_bias_mlp.2"),
            rules.replicated("continuous_position_bias_mlp.0"),
            rules.region_dropout("dropout"),
        ],
        "Swinv2SelfOutput": [rules.row("dense")],
        "Swinv2Intermediate": [rules.column("dense")],
        "Swinv2Output": [rules.row("dense")],
        "Swinv2Layer": _NORMS,
    }
