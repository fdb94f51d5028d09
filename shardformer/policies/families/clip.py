"""CLIP: an image tower, a text tower, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardformer.policies.table import GATHERS, TablePolicy, rules
from shardformer.stages.stage import IdentityPlaceholder, Received, StageLayout


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
