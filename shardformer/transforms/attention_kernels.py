"""Which kernel the attentions of a sharded model run, and what they exchange around it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shardformer.attention import route_own_attention, use_backend, use_sharded_attention
from shardformer.attention.scores import return_whole_scores
from shardformer.context_parallel.attention import use_context_attention
from shardformer.distributed.blocks import rank_of_draws
from shardformer.policies.base import Policy
from shardformer.sequence_parallel.split_gather import SequenceParallel
from shardformer.sequence_parallel.ulysses import UlyssesAllToAll
from shardformer.shard_config import ShardConfig


def route_attention(
    model: nn.Module,
    policy: Policy,
    config: ShardConfig,
    held_layers: Callable[[], list[list[nn.Module]]],
    exchanged: SequenceParallel | None,
    device: torch.device,
) -> None:
    """Route the attentions of `model` through the kernel that the options ask for.

    Args:
        model: the model, whose layers have been replaced.
        policy: of its family.
        config: the options.
        held_layers: returns the layers of this rank, by lists of consecutive ones.
        exchanged: the parts of sequences that attention in these layers exchanges for heads; None if it does not.
        device: that the model will run on.
    """
    shares_inputs = config.context is not None and exchanged is None
    if exchanged is not None or (config.enable_flash_attention and config.context is None):
        route_own_attention(model, policy.own_attention)
    if config.enable_flash_attention:
        dtype = config.compute_dtype or next(model.parameters(), torch.empty(0)).dtype
        use_backend(model, config.enable_flash_attention, device, dtype, not config.inference_only)
    layers = [layer for held in held_layers() for layer in held] if shares_inputs or exchanged is not None else []
    if shares_inputs:
        use_context_attention(model, layers, config.context_parallel_mode, config.context)
    exchange = None if exchanged is None else UlyssesAllToAll(exchanged)
    if config.tensor_parallel_size > 1 and policy.cuts_attention:
        use_sharded_attention(model, rank_of_draws(config.group), exchange, layers)
        return_whole_scores(model, policy.head_counts().values(), config.group)
    elif config.enable_flash_attention or exchange is not None:
        use_sharded_attention(model, None, exchange, layers)
