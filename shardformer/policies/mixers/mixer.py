"""Mixer: the rule of one kind of layer, for what styles of single parts do not tell; feed-forwards and experts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Protocol

from torch import nn

from shardformer.layers import ColumnParallelLinear, RowParallelLinear
from shardformer.policies.base import ModulePolicyDescription, PartChange, SubModuleReplacementDescription
from shardformer.policies.module_edits import share_feature_statistics
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
    """Return activations with parameters between column- and row-parallel layers: gradients are partial.

    Each rank applies such an activation to its own features only.
    """
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
