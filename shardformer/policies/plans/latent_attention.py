"""Heads of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) where transformers' plan leaves them whole.

So they stay where `tp_size` does not divide them, and with `reproducible=True`, whose blocks its forward does not read.
"""

from __future__ import annotations

from torch import nn

from shardformer.policies.feature_counts import HEAD_COUNTS, names_read
from shardformer.shard_config import ShardConfig
from shardformer.utils.module_paths import join, starred

# Projections to and from heads are cut; those to the compressed states, and their norms, are not.
_STYLES = {
    "q_proj": "colwise",
    "q_b_proj": "colwise",
    "kv_b_proj": "colwise",
    "o_proj": "rowwise",
    "kv_a_proj_with_mqa": "mla_kv_a_proj",
}
_WHOLE = {"q_a_proj", "q_a_layernorm", "kv_a_layernorm", "rotary_emb"}


def latent_attention_styles(model: nn.Module, style: str) -> dict[str, str]:
    """Return `style` for each part of latent attention that depends on heads, by its path with `*` for numbers.

    An attention with further parts (an indexer, scales for each head), or whose forward counts heads, has none.
    """
    return {
        starred(join(path, name)): style
        for path, module in model.named_modules()
        if _is_plain(module)
        for name in _STYLES
        if getattr(module, name, None) is not None
    }


def style_in(owner: nn.Module, name: str, config: ShardConfig) -> str | None:
    """Return the style of a part of latent attention under these options; None for what is no plain one."""
    if not _is_plain(owner):
        return None
    is_cut = owner.num_heads % config.tensor_parallel_size == 0 and not config.computes_in_blocks
    return _STYLES[name] if is_cut else "replicate"


def _is_plain(module: nn.Module) -> bool:
    children = {name for name, child in module._modules.items() if child is not None}
    if not {"kv_b_proj", "kv_a_proj_with_mqa", "o_proj"} <= children <= {*_STYLES, *_WHOLE} or module._parameters:
        return False
    return hasattr(module, "num_heads") and names_read(module).isdisjoint(HEAD_COUNTS)
