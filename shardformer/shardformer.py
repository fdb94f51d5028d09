"""ShardFormer, and ShardModel in one call: the facade of the sharding engine."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from shardformer.generation import generate_alike
from shardformer.layers.partial_gradients import sum_in_backward
from shardformer.peft import adapters_aside, keep_whole, model_inside
from shardformer.policies.base import Policy
from shardformer.policies.user.slots import SlotPolicyAdapter
from shardformer.shard_config import ShardConfig
from shardformer.sharder import ModelSharder, SharedParameters


class ShardFormer:
    """Turns a whole model into this rank's share of it.

    Example:
        model, shared_params = ShardFormer(ShardConfig(tensor_parallel_process_group=group)).optimize(model)

    Args:
        shard_config: what is to be done.
    """

    def __init__(self, shard_config: ShardConfig) -> None:
        self.shard_config = shard_config

    def optimize(self, model: nn.Module, policy: Policy | None = None) -> tuple[nn.Module, SharedParameters]:
        """Shard `model` in place.

        Args:
            model: the whole model, the same on every rank; it may be inside of peft's wrappers.
            policy: how its family is sharded; None to look it up by the model's class.

        Returns:
            The model, and the parameters that several pipeline stages hold (stage -> parameter).

        Raises:
            ValueError: no policy is known, or the model cannot be sharded as asked; nothing was changed then.
        """
        inside = model_inside(model)
        sharder = ModelSharder(inside, self.shard_config, policy)
        with adapters_aside(inside, sharder.config, sharder.policy):
            shared_params = sharder.shard()
        keep_whole(model.parameters(), sharder.config)
        if hasattr(inside, "generate"):
            generate_alike(inside, sharder.config)
        if self.shard_config.inference_only:
            model.eval().requires_grad_(False)
        sum_in_backward(model)
        return model, shared_params


class ShardModel:
    """Shards `model` in place over tensor-parallel ranks.

    Example:
        model = ShardModel(model, MyPolicy).model

    Args:
        model: the whole model, the same on every rank.
        policy: a class of slots (`argument_policy`, `attn_in`, ...), a `Policy`, or None for the family's own.
        process_group: the ranks; None for all.
        options: of `ShardConfig`.

    Attributes:
        model: the sharded model.

    Raises:
        ValueError: no policy is known, or the model cannot be sharded as asked; nothing was changed then.
        TypeError: `policy` is none.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: type | Policy | None = None,
        process_group: ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        config = ShardConfig(tensor_parallel_process_group=process_group, **options)
        self.model, self.shared_params = ShardFormer(config).optimize(model, as_policy(policy))


def as_policy(policy: type | Policy | None) -> Policy | None:
    """A policy of whatever describes one: its class, or a class of slots.

    Raises:
        TypeError: it describes none.
    """
    if policy is None or isinstance(policy, Policy):
        return policy
    if isinstance(policy, type) and hasattr(policy, "argument_policy"):
        return SlotPolicyAdapter(policy)
    if isinstance(policy, type) and issubclass(policy, Policy):
        return policy()
    raise TypeError(f"{policy!r} is no policy; use a Policy, or a class with argument_policy")
