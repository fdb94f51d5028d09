"""Feed-forwards and experts: what a plan of styles forgets between their columns and rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from shardformer.layers import ColumnParallelLinear, RowParallelLinear
from shardformer.policies.base import ModulePolicyDescription, SubModuleReplacementDescription
from shardformer.policies.mixers.mixer import HeadCounts, Mixer
from shardformer.policies.module_edits import share_feature_statistics


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
