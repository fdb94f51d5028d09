"""OPT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shardformer.context_parallel.zigzag import Positions
from shardformer.policies.table import GATHERS, HEADS, TablePolicy, local, rules
from shardformer.stages.stage import IdentityPlaceholder, Received, StageLayout, ZeroEmbedding


class OPTPolicy(TablePolicy):
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
    table = {
        "OPTDecoder": [rules.vocab("embed_tokens")],
        "OPTAttention": [
            GATHERS,
            local(num_heads=HEADS),
            rules.column("q_proj", "k_proj", "v_proj", num_heads=HEADS),
            rules.row("out_proj", num_heads=HEADS),
        ],
        "OPTDecoderLayer": [
            rules.draw_own_slice(),
            rules.column("fc1", gathers_sequence=True),
            rules.row("fc2"),
            rules.layer_norm("self_attn_layer_norm", "final_layer_norm"),
        ],
        "OPTForCausalLM": [rules.head("lm_head")],
    }

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
