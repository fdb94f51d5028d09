"""Plans for families without a plan in transformers, and module names that many of them share, with their styles."""

from __future__ import annotations

GATED_PARTS = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
GATED = {f"mlp.{part}": style for part, style in GATED_PARTS.items()}


def self_attention(output: str) -> dict[str, str]:
    """Return the styles of q_proj, k_proj, v_proj and the output projection `output` of self_attn."""
    return {**{f"self_attn.{part}_proj": "colwise" for part in "qkv"}, f"self_attn.{output}": "rowwise"}


# The layers of Llama.
LLAMA = {**self_attention("o_proj"), **GATED}
