"""Styles of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), which some plans leave whole."""

from __future__ import annotations

from torch import nn

from shardformer.policies.feature_counts import HEAD_COUNTS, names_read
from shardformer.utils.module_paths import join, starred

# Projections to and from heads are cut; those to the compressed states, and their norms, are not.
_OF_HEADS = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
_STYLES = {**_OF_HEADS, "kv_a_proj_with_mqa": "mla_kv_a_proj"}
_WHOLE = {"q_a_proj", "q_a_layernorm", "kv_a_layernorm", "rotary_emb"}


def latent_attention_styles(model: nn.Module) -> dict[str, str]:
    """Return the style of each projection of latent attention, by its path with `*` for numbers.

    An attention with further parts (an indexer, scales for each head), or whose forward counts heads, has none.
    """
    return {
        starred(join(path, name)): style
        for path, module in model.named_modules()
        if _is_plain(module)
        for name, style in _STYLES.items()
        if getattr(module, name, None) is not None
    }


def _is_plain(module: nn.Module) -> bool:
    children = {name for name, child in module._modules.items() if child is not None}
    if not {"kv_b_proj", "kv_a_proj_with_mqa", "o_proj"} <= children <= {*_STYLES, *_WHOLE} or module._parameters:
        return False
    return names_read(module).isdisjoint(HEAD_COUNTS)
