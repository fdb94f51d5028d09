"""Options of sharding: the policy of the model, and what it does to vocabularies and experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plugins.hybrid_parallel.config.option_group import (
    SWITCH,
    OptionGroup,
    Rule,
    not_negative,
    one_of,
    option,
    positive,
)
from shardformer import Policy, TPInfo


def _is_policy(value: Any) -> bool:
    if not isinstance(value, type):
        return isinstance(value, Policy)
    return issubclass(value, Policy) or hasattr(value, "argument_policy")


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(OptionGroup):
    """How weights are sharded.

    Attributes:
        custom_policy: how to shard a family that has no policy: a `Policy`, or a class of slots.
        tp_info: modules to shard, by the suffixes of their names, instead of a policy.
        sharding_dim: None shards weights as the family's policy says; -1 shards the output features of every linear
            layer and gathers them, 0 shards the input features and adds partial sums.
        make_vocab_size_divisible_by: vocabularies are padded to a multiple of this times `tp_size`.
        expert_capacity_factor: capacity of an expert per sequence, as a multiple of an equal share of its tokens; None
            for no limit.
        moe_router_bias_update_rate: by which the biases of routers move after each step, against the load of experts; 0
            leaves them.
        count_expert_load: count the tokens of each expert, for `model.expert_load()`.
    """

    custom_policy: Policy | type | None = option(
        None, Rule(((_is_policy, "is not a policy; use a Policy, or a class with argument_policy"),), Policy)
    )
    tp_info: TPInfo | None = option(
        None, Rule(((lambda value: isinstance(value, TPInfo), "use shardformer.TPInfo()"),), TPInfo(), False)
    )
    sharding_dim: int | None = option(None, one_of(None, 0, -1))
    make_vocab_size_divisible_by: int = option(64, positive(64))
    expert_capacity_factor: float | None = option(None, positive(1.25))
    moe_router_bias_update_rate: float = option(0.0, not_negative(0.001))
    count_expert_load: bool = option(False, SWITCH)

    @property
    def counts_experts(self) -> bool:
        """Whether the tokens of each expert are counted."""
        return self.count_expert_load or self.moe_router_bias_update_rate > 0

    def conflicts(self) -> list[str]:
        """Return one sentence for each broken rule between these options."""
        given = [name for name in ("custom_policy", "sharding_dim", "tp_info") if getattr(self, name) is not None]
        return [f"{' and '.join(given)} each say how weights are cut; use one of them"] if len(given) > 1 else []
