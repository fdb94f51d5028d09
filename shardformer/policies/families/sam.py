"""SAM: an image encoder, which is split into pipeline stages, followed by a small mask decoder."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shardformer.distributed.random import draw_per_rank
from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.rules import ShardingRules
from shardformer.stages.stage import Received, StageLayout


class SamPolicy(Policy):
    """Policy for SAM. Heads share the decomposed relative positions, so a rank's gradient of them is partial."""

    family, prefix = "sam", "Sam"
    heads = ("Model", "VisionModel")
    supports_sequence_parallel = False  # hidden states are images, [batch, height, width, hidden]
    head_losses = USUAL_HEAD_LOSSES

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
        config = self.model.config
        vision = getattr(config, "vision_config", config)
        counts = {"vision_config.num_attention_heads": vision.num_attention_heads}
        if hasattr(config, "mask_decoder_config"):
            counts["mask_decoder_config.num_attention_heads"] = config.mask_decoder_config.num_attention_heads
        return counts

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        rules = ShardingRules(self.shard_config)
        config = self.model.config
        vision = getattr(config, "vision_config", config)
        heads = vision.num_attention_heads
        table = {
            "SamVisionAttention": ModulePolicyDescription(
                {"num_attention_heads": heads // self.tp_size},
                [self._draw_per_rank, *rules.module_parameters("rel_pos_h", "rel_pos_w", partial_gradient=True)],
                [
                    *rules.column("qkv", num_heads=heads, part_size=vision.hidden_size),
                    *rules.row("proj", num_heads=heads),
                ],
            ),
            "SamMLPBlock": ModulePolicyDescription(sub_module_replacement=[*rules.column("lin1"), *rules.row("lin2")]),
            "SamVisionLayer": ModulePolicyDescription(
                sub_module_replacement=rules.layer_norm("layer_norm1", "layer_norm2")
            ),
        }
        if hasattr(config, "mask_decoder_config"):
            decoder_heads = config.mask_decoder_config.num_attention_heads
            # Query, key and value read three different inputs.
            projections = [rules.column(name, num_heads=decoder_heads) for name in ("q_proj", "k_proj", "v_proj")]
            table["SamAttention"] = ModulePolicyDescription(
                {"num_attention_heads": decoder_heads // self.tp_size},
                sub_module_replacement=[*sum(projections, []), *rules.row("out_proj", num_heads=decoder_heads)],
            )
        return table

    def _draw_per_rank(self, attention: nn.Module) -> nn.Module:
        if self.tp_size > 1:  # attention dropout is a function; the module draws nothing else
            return draw_per_rank(attention, self.shard_config.group.rank())
        return attention
