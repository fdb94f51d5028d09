"""The rows of families, in two forms, and styles that many of them share.

A class of `TablePolicy` describes the changes to each class of module; an entry of `PLANS` gives styles to paths, as
transformers' plans do. Entries of `HEAD_LOSSES` are for families that need no more. The JSON files have one line for
each family: what was derived from tiny models, and verified.
"""

from __future__ import annotations

GATED_PARTS = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
GATED = {f"mlp.{part}": style for part, style in GATED_PARTS.items()}


def attention(output: str, at: str = "self_attn") -> dict[str, str]:
    """Return the styles of q_proj, k_proj, v_proj and the output projection `output` of the attention `at`."""
    return {**{f"{at}.{part}_proj": "colwise" for part in "qkv"}, f"{at}.{output}": "rowwise"}


# The layers of Llama.
LLAMA = {**attention("o_proj"), **GATED}
# The layers of BERT.
BERT = {
    **{f"self.{part}": "colwise" for part in ("query", "key", "value")},
    "self.dropout": "dropout",
    "output.dense": "rowwise",
    "intermediate.dense": "colwise",
}
