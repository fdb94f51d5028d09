"""Attention: norms of heads that a plan of styles forgets, and the queries of a key/value head on a rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from shardformer.policies.base import ModulePolicyDescription, SubModuleReplacementDescription
from shardformer.policies.feature_counts import HEAD_NORM
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
