"""SAM: an image encoder, which is split into pipeline stages, followed by a small mask decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardformer.policies.base import Policy
from shardformer.policies.table import Entry, TablePolicy, local, rules
from shardformer.stages.stage import Received, StageLayout


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
