"""ShardModel: a model and how it is cut, in one call."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from shardformer.policies.base import Policy
from shardformer.policies.slots import SlotTable
from shardformer.shard_config import ShardConfig
from shardformer.shardformer import ShardFormer


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
        return SlotTable(policy)
    if isinstance(policy, type) and issubclass(policy, Policy):
        return policy()
    raise TypeError(f"{policy!r} is no policy; use a Policy, or a class with argument_policy")
