"""Attention: norms of heads that a plan of styles forgets, and the queries of a key/value head on a rank.

Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): transformers' plan leaves its heads whole. So they stay
where `tp_size` does not divide them, and with `reproducible=True`, whose blocks its forward does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from torch import nn

from shardformer.policies.base import ModulePolicyDescription, SubModuleReplacementDescription
from shardformer.policies.feature_counts import HEAD_COUNTS, HEAD_NORM, names_read
from shardformer.policies.mixers.mixer import HeadCounts, Mixer
from shardformer.policies.module_edits import has_norms_of_heads, read_norms_of_heads, shard_weights_of_heads
from shardformer.utils.module_paths import join, path_of, starred


class Attention(Mixer):
    """The rule of attention whose projections a plan names."""

    def complete(self, policy: HeadCounts, path: str, owner: nn.Module, description: ModulePolicyDescription) -> None:
        """Add norms of heads, and the local number of query heads of a key/value head."""
        description.attribute_replacement |= _local_groups(policy, owner)
        description.sub_module_replacement += _head_norms(policy, path, owner)
        description.param_replacement += _norms_by_head(policy, path, owner)


def _local_groups(policy: HeadCounts, owner: nn.Module) -> dict[str, int]:
    """Return the local number of query heads per key/value head if key/value heads are copied; else nothing."""
    groups, path = getattr(owner, "num_key_value_groups", None), path_of(policy.model, owner)
    # A part of an attention may count them as well (NeoMME).
    paths = [each for each in (path, path.rpartition(".")[0]) if policy.plan.get(starred(join(each, "k_proj")))]
    if not isinstance(groups, int) or not paths or policy.plan[starred(join(paths[0], "k_proj"))] != "colwise":
        return {}
    owner = policy.model.get_submodule(paths[0])
    key = getattr(owner, "k_proj", None)
    if key is None:  # the layer reads the keys and values of an earlier one
        kv_heads = policy.model.config.get_text_config().num_attention_heads // groups
    else:
        kv_heads = policy.heads_of(owner, "k_proj", key.out_features)
    if kv_heads is None or kv_heads % policy.tp_size == 0:
        return {}
    return {"num_key_value_groups": groups * kv_heads // policy.tp_size}


def _head_norms(policy: HeadCounts, path: str, owner: nn.Module) -> list[SubModuleReplacementDescription]:
    """Return norms of heads missing in the plan: parameters are replicated, but see only a rank's own heads."""
    head_dim = getattr(owner, "head_dim", None)
    return [
        SubModuleReplacementDescription(name, None, partial_gradient=True)
        for name, norm in _forgotten_norms(policy, path, owner)
        if all(param.numel() == head_dim for param in norm.parameters())
    ]


def _norms_by_head(policy: HeadCounts, path: str, owner: nn.Module) -> list[Callable[[nn.Module], None]]:
    """Return changes that give each rank the norms of its heads: weights [heads, head_dim], or a list of norms."""
    head_dim, changes = getattr(owner, "head_dim", None), []
    for name, norm in _forgotten_norms(policy, path, owner):
        if all(param.dim() == 2 and param.shape[1] == head_dim for param in norm.parameters()):
            changes.append(partial(shard_weights_of_heads, name=name, group=policy.shard_config.group))
        elif has_norms_of_heads(norm) and policy.tp_size > 1:
            changes.append(partial(read_norms_of_heads, name=name, group=policy.shard_config.group))
    return changes


def _forgotten_norms(policy: HeadCounts, path: str, owner: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, norm) of head norms after column-parallel projections that the plan does not name."""
    if policy.plan.get(starred(join(path, "q_proj"))) != "colwise":
        return []
    found = [(name, norm) for name, norm in owner.named_children() if any(True for _ in norm.parameters())]
    return [
        (name, norm)
        for name, norm in found
        if HEAD_NORM.fullmatch(name) and starred(join(path, name)) not in policy.plan
    ]


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
