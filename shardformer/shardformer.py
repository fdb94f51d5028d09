"""ShardFormer: the facade of the sharding engine."""

from __future__ import annotations

from torch import nn

from shardformer.adapters import adapters_aside, keep_whole, model_inside
from shardformer.generation import generate_alike
from shardformer.partial_gradients import sum_in_backward
from shardformer.policies.base import Policy
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
