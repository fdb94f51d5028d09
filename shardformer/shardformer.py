"""Public entry points of the sharding engine: ShardFormer and the one-call ShardModel."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from shardformer.generation import generate_in_step
from shardformer.layers.parallel_module import sum_partial_gradients
from shardformer.peft import adapters_detached, keep_whole, model_inside, prompts_followed, prompts_on_stages
from shardformer.policies.base import Policy
from shardformer.policies.user.policy import SlotPolicyAdapter
from shardformer.shard_config import ShardConfig
from shardformer.sharder import ModelSharder, SharedParameters
from shardformer.utils.freed_memory import return_freed_memory


class ShardFormer:
    """Shards a full model and keeps this rank's part.

    Example:
        ```python
        model, shared_params = ShardFormer(ShardConfig(tensor_parallel_process_group=group)).optimize(model)
        ```

    Args:
        shard_config: the sharding options.
    """

    def __init__(self, shard_config: ShardConfig) -> None:
        self.shard_config = shard_config

    def optimize(self, model: nn.Module, policy: Policy | None = None) -> tuple[nn.Module, SharedParameters]:
        """Shard `model` in place.

        Args:
            model: the full model, identical on every rank; it may be wrapped by peft.
            policy: how the model family is sharded; None looks the policy up by the model's class.

        Returns:
            The model, and the parameters shared by several pipeline stages (stage -> parameter).

        Raises:
            ValueError: no policy is known, or the model cannot be sharded as requested. The model is then unchanged.
        """
        shared_params = self._shard(model, policy)
        return_freed_memory()  # of whole layers, which nothing refers to any more
        return model, shared_params

    def _shard(self, model: nn.Module, policy: Policy | None) -> SharedParameters:
        inside = model_inside(model)
        sharder = ModelSharder(inside, self.shard_config, policy)
        config, policy = sharder.config, sharder.policy
        with prompts_followed(model, config, policy), adapters_detached(inside, config, policy):
            shared_params = sharder.shard()
        keep_whole(model.parameters(), config)
        shared_params += prompts_on_stages(model, self.shard_config.stage_manager)
        if hasattr(inside, "generate"):
            generate_in_step(inside, config)
        if self.shard_config.inference_only:
            model.eval().requires_grad_(False)
        sum_partial_gradients(model)
        return shared_params


class ShardModel:
    """Shards `model` in place across tensor-parallel ranks.

    Example:
        ```python
        model = ShardModel(model, MyPolicy).model
        ```

    Args:
        model: the full model, identical on every rank.
        policy: a slot policy class (`argument_policy`, `attn_in`, ...), a `Policy`, or None for the family's policy.
        process_group: the tensor-parallel process group; None for all ranks.
        options: further options of `ShardConfig`.

    Attributes:
        model: the sharded model.

    Raises:
        ValueError: no policy is known, or the model cannot be sharded as requested. The model is then unchanged.
        TypeError: `policy` does not describe a policy.
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
    """Convert a policy, a policy class or a slot policy class to a `Policy` object; None stays None.

    Raises:
        TypeError: `policy` is none of these.
    """
    if policy is None or isinstance(policy, Policy):
        return policy
    if isinstance(policy, type) and hasattr(policy, "argument_policy"):
        return SlotPolicyAdapter(policy)
    if isinstance(policy, type) and issubclass(policy, Policy):
        return policy()
    raise TypeError(f"{policy!r} is not a policy; use a Policy, or a class with argument_policy")
