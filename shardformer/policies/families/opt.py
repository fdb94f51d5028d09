"""OPT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardformer.context_parallel.zigzag import Positions
from shardformer.distributed.random import draw_per_rank
from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.rules import ShardingRules
from shardformer.stages.stage import IdentityPlaceholder, Received, StageLayout, ZeroEmbedding


class OPTPolicy(Policy):
    """Policy for OPT. Its layers flatten batch and sequence before the feed-forward."""

    family, prefix = "opt", "OPT"
    heads = ("Model", "ForCausalLM", "ForSequenceClassification", "ForQuestionAnswering")
    supports_sequence_parallel = True
    stages = StageLayout(
        layers="decoder.layers",
        first={
            "decoder.embed_tokens": Received,
            "decoder.project_in": IdentityPlaceholder,
            "decoder.embed_positions": ZeroEmbedding,
        },
        last=("decoder.final_layer_norm", "decoder.project_out"),
    )
    head_losses = USUAL_HEAD_LOSSES

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        rules = ShardingRules(self.shard_config)
        heads = self.model.config.num_attention_heads
        return {
            "OPTDecoder": ModulePolicyDescription(sub_module_replacement=rules.vocab("embed_tokens")),
            "OPTAttention": ModulePolicyDescription(
                {"num_heads": heads // self.tp_size},
                sub_module_replacement=[
                    *rules.column("q_proj", "k_proj", "v_proj", num_heads=heads),
                    *rules.row("out_proj", num_heads=heads),
                ],
                gathers_sequence=True,
            ),
            "OPTDecoderLayer": ModulePolicyDescription(
                param_replacement=[self._drop_own_slice],
                sub_module_replacement=[
                    *rules.column("fc1", gathers_sequence=True),
                    *rules.row("fc2"),
                    *rules.layer_norm("self_attn_layer_norm", "final_layer_norm"),
                ],
            ),
            "OPTForCausalLM": ModulePolicyDescription(sub_module_replacement=rules.head("lm_head")),
        }

    def _drop_own_slice(self, layer: nn.Module) -> nn.Module:
        """Draw functional dropout between the regions per rank, because each rank holds its own sequence slice."""
        sees_slice = self.shard_config.sequence is not None
        return draw_per_rank(layer, self.shard_config.group.rank()) if sees_slice else layer

    def position_counter(self) -> Positions:
        """Return a function that counts positions from the attention mask."""

        def of_real_tokens(inputs: Mapping[str, Any]) -> Tensor | None:
            mask = inputs.get("attention_mask")
            return None if mask is None else (mask.cumsum(dim=1) * mask - 1).long()

        return of_real_tokens

    def check(self) -> list[str]:
        """Return why the model cannot be sharded; a pipeline cannot skip layers at random."""
        problems = super().check()
        layerdrop = self.model.config.layerdrop
        if layerdrop and self.shard_config.stage_manager.num_stages > 1:
            problems.append(f"layerdrop={layerdrop} skips layers at random, which a pipeline cannot; use 0.0")
        return problems
