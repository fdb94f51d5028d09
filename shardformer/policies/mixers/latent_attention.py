"""Heads of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) where transformers' plan leaves them whole.

So they stay where `tp_size` does not divide them, and with `reproducible=True`, whose blocks its forward does not read.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from shardformer.policies.feature_counts import HEAD_COUNTS, names_read
from shardformer.policies.mixers.mixer import HeadCounts, Mixer

# Projections to and from heads are cut; those to the compressed states, and their norms, are not.
_STYLES = {
    "q_proj": "colwise",
    "q_b_proj": "colwise",
    "kv_b_proj": "colwise",
    "o_proj": "rowwise",
    "kv_a_proj_with_mqa": "mla_kv_a_proj",
}
_WHOLE = {"q_a_proj", "q_a_layernorm", "kv_a_layernorm", "rotary_emb"}


class LatentAttention(Mixer):
    """The rule of latent attention. One with further parts (an indexer), or whose forward counts heads, is another."""

    fills = True

    def parts(self, module: nn.Module) -> Collection[str]:
        """Return the names of the parts that depend on heads."""
        return [name for name in _STYLES if getattr(module, name, None) is not None] if _is_plain(module) else ()

    def change(self, policy: HeadCounts, owner: nn.Module, name: str) -> str:
        """Return the style of a part under these options."""
        config = policy.shard_config
        is_cut = owner.num_heads % config.tensor_parallel_size == 0 and not config.computes_in_blocks
        return _STYLES[name] if is_cut else "replicate"


def _is_plain(module: nn.Module) -> bool:
    children = {name for name, child in module._modules.items() if child is not None}
    if not {"kv_b_proj", "kv_a_proj_with_mqa", "o_proj"} <= children <= {*_STYLES, *_WHOLE} or module._parameters:
        return False
    return hasattr(module, "num_heads") and names_read(module).isdisjoint(HEAD_COUNTS)
