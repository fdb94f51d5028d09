"""`resolve(model)`: how a model is cut, part by part, and who says so.

What comes first: a policy, a TPInfo, slots or a derived plan that the user gives; `sharding_dim`; and what `registry`
finds for the model's class. All of them are policies, and end in one table that `ModelSharder` applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from torch import nn

from shardformer.policies.backbone import BackbonePolicy
from shardformer.policies.base import Origin, PlanEntry, Policy
from shardformer.policies.plans.propose import ProposedPolicy
from shardformer.policies.registry import policy_for
from shardformer.policies.user_policy import SlotPolicyAdapter, TPInfoPolicy, UniformPolicy
from shardformer.shard_config import ShardConfig


@dataclass(frozen=True)
class ResolvedPlan:
    """How a model is cut under some options."""

    origin: Origin
    # part of the model -> its style, and who says so. A part is a path with `*` for numbers, or one below the class of
    # its module; parts that no entry names are whole on every rank.
    entries: Mapping[str, PlanEntry]

    def __str__(self) -> str:
        width = max(map(len, self.entries), default=0)
        return "\n".join(f"{path:{width}}  {it.style}: {it.origin.value}" for path, it in self.entries.items())


def resolve(model: nn.Module, shard_config: ShardConfig | None = None, policy: Policy | None = None) -> ResolvedPlan:
    """Return how an unchanged model is cut; `policy`: the user's; None: by class; ValueError if unknown."""
    config = shard_config or ShardConfig()
    found = policy_of(model, config, policy)
    found.set_model(model)
    found.set_shard_config(config)
    return ResolvedPlan(found.origin, found.entries())


def policy_of(model: nn.Module, config: ShardConfig, given: Policy | None) -> Policy:
    """Return the user's policy, in part if it leaves backbones to theirs, or the family's; ValueError if unknown."""
    is_ordered = isinstance(given, ProposedPolicy) and given.declared.execution
    if isinstance(given, TPInfoPolicy | SlotPolicyAdapter | ProposedPolicy) and not is_ordered:
        with suppress(ValueError):
            found = policy_for(model)
            return BackbonePolicy(policy_for, given) if isinstance(found, BackbonePolicy) else given
    if given is not None:
        return given
    return policy_for(model) if config.sharding_dim is None else UniformPolicy(config.sharding_dim)
