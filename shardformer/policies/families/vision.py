"""Models of images: ViT and its likes, Swin, SAM, CLIP and BLIP-2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.attention.own_attention import Swinv2RegistryAttention
from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.loss.perception import masked_visual_tokens
from shardformer.loss.text import language_of_images
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.registry import policy_for
from shardformer.policies.rules import GATHERS, HEADS, Entry, TablePolicy, described, local, own, rules, variant
from shardformer.stages.layout import chained
from shardformer.stages.stage import IdentityPlaceholder, Received, ReceivedPatches, StageLayout, StagePlaceholder

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
    reads_hidden_states = _FIRST_HIDDEN_STATE
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
    reads_hidden_states = ("SwinBackbone", "Swinv2Backbone")
    supports_sequence_parallel = False  # parts of sequences are not made of whole windows
    supports_ulysses = False

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


def _vision(policy: Policy) -> Any:
    return getattr(policy.model.config, "vision_config", policy.model.config)


def _heads(policy: Policy) -> int:
    return _vision(policy).num_attention_heads


def _decoder_heads(policy: Policy) -> int:
    return policy.model.config.mask_decoder_config.num_attention_heads


_ENCODER = {
    "SamVisionAttention": [
        local(num_attention_heads=_heads),
        rules.draw_per_rank(),  # attention dropout is a function; the module draws nothing else
        rules.module_parameters("rel_pos_h", "rel_pos_w", partial_gradient=True),
        rules.column("qkv", num_heads=_heads, part_size=lambda policy: _vision(policy).hidden_size),
        rules.row("proj", num_heads=_heads),
    ],
    "SamMLPBlock": [rules.column("lin1"), rules.row("lin2")],
    "SamVisionLayer": [rules.layer_norm("layer_norm1", "layer_norm2")],
}
_DECODER = {
    "SamAttention": [
        local(num_attention_heads=_decoder_heads),
        *(
            rules.column(name, num_heads=_decoder_heads) for name in ("q_proj", "k_proj", "v_proj")
        ),  # read different inputs
        rules.row("out_proj", num_heads=_decoder_heads),
    ]
}


class SamPolicy(TablePolicy):
    """Policy for SAM. Heads share the decomposed relative positions, so a rank's gradient of them is partial."""

    family, prefix = "sam", "Sam"
    heads = ("Model", "VisionModel")
    supports_sequence_parallel = False  # hidden states are images, [batch, height, width, hidden]

    @property
    def stages(self) -> StageLayout:
        """The stage layout: the layers of the image encoder."""
        return StageLayout(
            layers="vision_encoder.layers",
            first={"vision_encoder.patch_embed": Received},
            every=("vision_encoder.pos_embed", "shared_image_embedding"),
            last=("vision_encoder.neck", "prompt_encoder", "mask_decoder"),
        )

    def head_counts(self) -> Mapping[str, int]:
        """Return the head counts of the image encoder and, if the model has one, of the mask decoder."""
        counts = {"vision_config.num_attention_heads": _heads(self)}
        if hasattr(self.model.config, "mask_decoder_config"):
            counts["mask_decoder_config.num_attention_heads"] = _decoder_heads(self)
        return counts

    @property
    def table(self) -> Mapping[str, list[Entry]]:
        """The table of the image encoder and, if the model has one, of the mask decoder."""
        return _ENCODER | (_DECODER if hasattr(self.model.config, "mask_decoder_config") else {})


class CLIPPolicy(TablePolicy):
    """Policy for CLIP. If the model has both towers, the image tower runs first."""

    family, prefix = "clip", "CLIP"
    heads = (
        "Model",
        "TextModel",
        "VisionModel",
        "TextModelWithProjection",
        "VisionModelWithProjection",
        "ForImageClassification",
    )
    supports_sequence_parallel = True
    splits_towers = True
    head_losses = {}

    @property
    def stages(self) -> StageLayout:
        """The stage layout of the towers that the model has."""
        base = self.model.get_submodule(self.base_path)
        if hasattr(base, "final_layer_norm"):
            return _text_layout("")
        if hasattr(base, "post_layernorm"):
            return _vision_layout("")
        vision = _vision_layout("vision_model.")
        if not hasattr(base, "text_model"):
            return replace(vision, last=(*vision.last, "classifier"))
        text = _text_layout("text_model.")
        return replace(
            vision,
            # The last stage projects the output of the image tower, which runs on an earlier stage.
            every=("visual_projection", "logit_scale"),
            finished_towers={"vision_model": ("pooler_output",)},
            next_layers=replace(text, last=(*text.last, "text_projection")),
        )

    def tokens_mix_only_in_attention(self) -> bool:
        """Return False."""
        return False  # the text pooler searches for the last token

    def head_counts(self) -> Mapping[str, int]:
        """Return the head count of each tower."""
        return {
            f"{tower}num_attention_heads": config.num_attention_heads for tower, config in self._tower_configs().items()
        }

    table = {
        "CLIPTextEmbeddings": [rules.vocab("token_embedding")],
        "CLIPAttention": [GATHERS, rules.column("q_proj", "k_proj", "v_proj"), rules.row("out_proj")],
        "CLIPMLP": [GATHERS, rules.column("fc1"), rules.row("fc2")],
        "CLIPEncoderLayer": [rules.layer_norm("layer_norm1", "layer_norm2")],
    }

    def _tower_configs(self) -> Mapping[str, Any]:
        """Return the configurations of the model's towers, by the prefix of their option names."""
        config = self.model.config
        if hasattr(config, "num_attention_heads"):
            return {"": config}
        towers = {"vision_config.": config.vision_config}
        return towers | ({"text_config.": config.text_config} if hasattr(self.model, "text_model") else {})


def _vision_layout(tower: str) -> StageLayout:
    return StageLayout(
        layers=f"{tower}encoder.layers",
        first={f"{tower}embeddings": Received, f"{tower}pre_layrnorm": IdentityPlaceholder},
        last=(f"{tower}post_layernorm",),
    )


def _text_layout(tower: str) -> StageLayout:
    return StageLayout(
        layers=f"{tower}encoder.layers", first={f"{tower}embeddings": Received}, last=(f"{tower}final_layer_norm",)
    )


def _qformer_heads(policy: Policy) -> int:
    return policy.model.config.qformer_config.num_attention_heads


def _attention(reads_image: bool) -> list[Entry]:
    # Keys and values of a cross-attention read the image, so they do not share the query's input.
    return [
        GATHERS,
        rules.column("query", num_heads=_qformer_heads),
        rules.column("key", "value", num_heads=_qformer_heads, reads_whole=reads_image),
    ]


_OUTPUT = [rules.layer_norm("LayerNorm"), rules.residual_dropout("dropout")]


class Blip2Policy(TablePolicy):
    """Policy for BLIP-2. The language model is sharded by the policy of its own family."""

    family, prefix = "blip_2", "Blip2"
    heads = ("ForConditionalGeneration", "Model")
    supports_sequence_parallel = True
    splits_towers = True
    head_losses = dict.fromkeys(("Blip2ForConditionalGeneration", "Blip2Model"), language_of_images)

    @cached_property
    def language_policy(self) -> Policy:
        """The policy of the language model."""
        policy = policy_for(self.model.language_model)
        policy.set_model(self.model.language_model)
        policy.set_shard_config(self.shard_config)
        return policy

    @property
    def stages(self) -> StageLayout:
        """The stage layout: image encoder, querying transformer, then the layers of the language model."""
        part = self.language_policy
        vision = StageLayout(
            layers="vision_model.encoder.layers",
            first={"vision_model.embeddings": Received},
            every=("query_tokens",),
            last=("vision_model.post_layernorm",),
            finished_towers={"vision_model": ("last_hidden_state",)},
        )
        queries = StageLayout(
            layers="qformer.encoder.layer",
            first={"qformer.layernorm": IdentityPlaceholder},
            last=("language_projection",),
            # No fields: its output is turned into embeddings of the language model, which later stages do not need.
            finished_towers={"qformer": ()},
        )
        path = ".".join(filter(None, ("language_model", part.base_path)))
        language = [] if part.stages is None else [each.below(path) for each in part.stages.chain]
        if part.base_path and language:  # the head of the language model runs after its base model
            base = part.base_path.split(".")[0]
            names = (name for name, _ in self.model.language_model.named_children() if name != base)
            last = (*language[-1].last, *(f"language_model.{name}" for name in names))
            language[-1] = replace(language[-1], last=last)
        return chained([vision, queries, *language])

    def _cross_attentions(self) -> list[str]:
        paths = [path for path, _ in self.model.named_modules()]
        return [path for path in paths if path.startswith("qformer.") and path.endswith(".crossattention.attention")]

    @property
    def inner(self) -> Sequence[Policy]:
        """The policy of the language model."""
        return (self.language_policy,)

    def head_counts(self) -> Mapping[str, int]:
        """Return the head counts of the image encoder and the querying transformer."""
        config = self.model.config
        return {
            f"{tower}.num_attention_heads": getattr(config, tower).num_attention_heads
            for tower in ("vision_config", "qformer_config")
        }

    table = {
        # It reshapes by the size of its input, so weights are sharded but every rank computes all heads.
        "Blip2Attention": [rules.run_whole(), rules.gathered("qkv"), rules.row_split_input("projection")],
        "Blip2MLP": [GATHERS, rules.column("fc1"), rules.row("fc2")],
        "Blip2EncoderLayer": [rules.layer_norm("layer_norm1", "layer_norm2")],
        "Blip2QFormerMultiHeadAttention": _attention(reads_image=False),
        "Blip2QFormerSelfOutput": [rules.row("dense", num_heads=_qformer_heads), *_OUTPUT],
        "Blip2QFormerIntermediate": [GATHERS, rules.column("dense")],
        "Blip2QFormerOutput": [rules.row("dense"), *_OUTPUT],
    }

    def module_policy(self) -> Mapping[str | type[nn.Module], ModulePolicyDescription]:
        """Return the table, with cross-attentions by path, and that of the language model."""
        table = dict(super().module_policy())
        table |= {path: described(_attention(reads_image=True), self) for path in self._cross_attentions()}
        if not self.shard_config.uses_ulysses:
            table["Blip2Attention"].attribute_replacement["attention_is_replicated"] = True
        return table | self.language_policy.module_policy()

    def preprocess(self) -> nn.Module:
        """Prepare the language model for its policy."""
        self.language_policy.preprocess()
        return self.model
