"""Reasons why a layout conflicts with what a model computes across tokens, layers or heads."""

from __future__ import annotations

from torch import nn

from shardformer.attention import uses_registry
from shardformer.loss.routers import router_loss_of
from shardformer.policies.base import Policy
from shardformer.shard_config import ShardConfig
from shardformer.transforms.context_parallel import counting_reasons


def router_problems(model: nn.Module, config: ShardConfig) -> list[str]:
    """Return layouts that conflict with a load-balancing loss, which reads the scores of all layers and tokens."""
    routers = router_loss_of(model)
    adds_up = routers is not None and routers.adds_up
    stages = config.stage_manager.num_stages
    spread = {
        f"pp_size={stages}": stages > 1 and not adds_up,
        "cp_size above 1": config.context is not None and not adds_up,
        "sequence_parallelism_mode='all_to_all'": config.uses_ulysses and not adds_up,
    }
    return [
        f"output_router_logits=True adds a loss over the router scores of all layers and tokens, which {what} "
        "spreads over ranks; use output_router_logits=False, or another layout"
        for what, is_asked in spread.items()
        if is_asked
    ]


def exchange_problems(model: nn.Module, policy: Policy, config: ShardConfig) -> list[str]:
    """Return what keeps `all_to_all` from exchanging heads: it needs attention that uses the registry."""
    mode, name = "sequence_parallelism_mode='all_to_all'", type(model).__name__
    attends = policy.own_attention or any(uses_registry(module) for module in model.modules())
    if not attends or not policy.supports_ulysses:
        return [f"{mode} cannot reach the attention of {name}; use 'split_gather' or no sequence parallelism"]
    if policy.stages is not None and (reason := next(counting_reasons(model, policy), None)) is not None:
        return [
            f"{mode} cannot divide the sequences of {name}, {reason}; use 'split_gather' or no sequence parallelism"
        ]
    size = config.tensor_parallel_size
    kv_heads = getattr(model.config, "num_key_value_heads", None) or size
    if kv_heads % size and size % kv_heads:
        return [f"{mode} with tp_size={size} neither divides num_key_value_heads={kv_heads} nor is a multiple of it"]
    return []
