"""Mixer: the rule of one kind of layer, for what styles of single parts do not tell; feed-forwards and experts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Protocol

from torch import nn

from shardformer.layers import ColumnParallelLinear, RowParallelLinear
from shardformer.policies.base import ModulePolicyDescription, PartChange, SubModuleReplacementDescription
from shardformer.policies.feature_counts import HEAD_COUNTS, HEAD_NORM, names_read
from shardformer.policies.module_edits import (
    has_norms_of_heads,
    read_norms_of_heads,
    shard_weights_of_heads,
    share_feature_statistics,
)
from shardformer.shard_config import ShardConfig
from shardformer.utils.module_paths import join, starred

MIXER = "attention_heads"  # the style of a part that a rule cuts


class HeadCounts(Protocol):
    """The part of the policy of a plan that styles and rules read."""

    model: nn.Module
    shard_config: ShardConfig

    @property
    def plan(self) -> Mapping[str, str]:
        """The style of each path of the model, with `*` for numbers."""

    @property
    def tp_size(self) -> int:
        """Number of ranks that each weight is sharded over."""

    def heads_of(self, owner: nn.Module, name: str, features: int) -> int | None:
        """Return the number of heads of a projection to or from `features`; None if it is not part of attention."""


class Mixer:
    """The rule of one kind of layer. A further one is a file with a derived class, and an entry in `RULES`.

    Attributes:
        fills: whether the rule only fills gaps of transformers' own plans; otherwise it precedes every plan that this
            package or transformers has for a family.
    """

    fills = False

    def parts(self, module: nn.Module) -> Collection[str]:
        """Return the names of the parts of a module that the rule cuts; none if the module is of another kind."""
        return ()

    def styles(self, model: nn.Module, planned: Mapping[str, str]) -> dict[str, str]:
        """Return the styles that the rule adds to those of the family's plan, by path with `*` for numbers."""
        modules = model.named_modules()
        return {starred(join(path, name)): MIXER for path, module in modules for name in self.parts(module)}

    def change(self, policy: HeadCounts, owner: nn.Module, name: str) -> PartChange | str | None:
        """Return how a part of such a module is sharded, or its style; None if every rank has all of it."""
        raise NotImplementedError

    def local_counts(self, owner: nn.Module, config: ShardConfig) -> dict[str, int]:
        """Return a rank's counts of heads and features; empty if it has all, or for a module of another kind."""
        return {}

    def complete(self, policy: HeadCounts, path: str, owner: nn.Module, description: ModulePolicyDescription) -> None:
        """Add to the description of a module of any kind, whose parts are described, what styles do not tell."""
        description.attribute_replacement |= self.local_counts(owner, policy.shard_config)


class FeedForward(Mixer):
    """The rule of feed-forwards, gated or not, whose linear layers a plan names."""

    def complete(self, policy: HeadCounts, path: str, owner: nn.Module, description: ModulePolicyDescription) -> None:
        """Add activations with parameters, and those that depend on all features."""
        description.sub_module_replacement += _learned_activations(owner, description)
        description.param_replacement += _feature_statistics(policy, owner, description)


def _learned_activations(
    owner: nn.Module, description: ModulePolicyDescription
) -> list[SubModuleReplacementDescription]:
    """Return activations with parameters on a rank's own features between cut layers: gradients are partial."""
    targets = {replacement.target_module for replacement in description.sub_module_replacement}
    if not {ColumnParallelLinear, RowParallelLinear} <= targets:
        return []
    names = [name for name, child in owner.named_children() if "act" in name and any(True for _ in child.parameters())]
    return [SubModuleReplacementDescription(name, None, partial_gradient=True) for name in names]


def _feature_statistics(
    policy: HeadCounts, owner: nn.Module, description: ModulePolicyDescription
) -> list[Callable[[nn.Module], None]]:
    """Return the change of a feed-forward whose activation depends on all of its features."""
    targets = {replacement.target_module for replacement in description.sub_module_replacement}
    if policy.tp_size == 1 or ColumnParallelLinear not in targets or not hasattr(owner, "_gaussian_topk"):
        return []
    return [partial(share_feature_statistics, group=policy.shard_config.group)]


class Experts(Mixer):
    """Adds the sum over ranks where transformers' plan has no entry for it, as that of Qwen3-Omni in 5.17."""

    fills = True

    def styles(self, model: nn.Module, planned: Mapping[str, str]) -> dict[str, str]:
        """Return the style of experts with divided output projections."""
        owners = (path.rpartition(".")[0] for path, style in planned.items() if style == "rowwise")
        return {owner: "moe_tp_experts" for owner in owners if owner.endswith(".experts")}


class Attention(Mixer):
    """The rule of attention whose projections a plan names."""

    def complete(self, policy: HeadCounts, path: str, owner: nn.Module, description: ModulePolicyDescription) -> None:
        """Add norms of heads, and the local number of query heads of a key/value head."""
        description.attribute_replacement |= _local_groups(policy, path, owner)
        description.sub_module_replacement += _head_norms(policy, path, owner)
        description.param_replacement += _norms_by_head(policy, path, owner)


def _local_groups(policy: HeadCounts, path: str, owner: nn.Module) -> dict[str, int]:
    """Return the local number of query heads per key/value head if key/value heads are copied; else nothing."""
    groups = getattr(owner, "num_key_value_groups", None)
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
