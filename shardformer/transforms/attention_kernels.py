"""Which kernel the attentions of a sharded model run, what they exchange around it, and the scores that they return."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.attention import route_own_attention, use_backend, use_sharded_attention
from shardformer.context_parallel.attention import use_context_attention
from shardformer.distributed.blocks import joined_blocks, rank_of_draws
from shardformer.distributed.collectives import gather_from_region
from shardformer.policies.base import Policy
from shardformer.sequence_parallel.split_gather import SequenceParallel
from shardformer.sequence_parallel.ulysses import UlyssesAllToAll
from shardformer.shard_config import ShardConfig

_FIELDS = "attentions"  # attentions, cross_attentions, encoder_attentions, ...


def return_whole_scores(model: nn.Module, head_counts: Collection[int], group: ProcessGroup) -> None:
    """Let `model` return the scores of all heads when it is asked for scores.

    Args:
        head_counts: possible numbers of heads of an attention in the whole model.
        group: the ranks that share the heads.
    """
    counts = frozenset(head_counts)

    def gather(_: nn.Module, __: tuple, outputs: Any) -> Any:
        return whole_scores(outputs, counts, group)

    for module in _returning(model):
        module.register_forward_hook(gather)


def _returning(model: nn.Module) -> list[nn.Module]:
    """Return the modules that return scores: both halves of an encoder-decoder, since `generate` calls one alone."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return [model]
    halves = [getattr(model, f"get_{half}", lambda: None)() for half in ("encoder", "decoder")]
    is_known = all(isinstance(half, nn.Module) and half is not model for half in halves) and halves[0] is not halves[1]
    return halves if is_known else [model]


def whole_scores(outputs: Any, head_counts: Collection[int], group: ProcessGroup) -> Any:
    """Gather the scores of all heads in `outputs` of transformers, in place; return anything else unchanged.

    Raises:
        ValueError: ranks have neither all heads nor shards that add up to all heads.
    """
    if not isinstance(outputs, Mapping):
        return outputs
    for name, value in outputs.items():
        if name.endswith(_FIELDS):
            outputs[name] = _ScoreGather(name, head_counts, group).of(value)
        elif isinstance(value, Mapping):  # outputs of a tower
            whole_scores(value, head_counts, group)
    return outputs


class _ScoreGather:
    """Gathers the scores of one field: tensors [batch, heads, queries, keys] in tuples."""

    def __init__(self, name: str, head_counts: Collection[int], group: ProcessGroup) -> None:
        self.name, self.head_counts, self.group = name, head_counts, group

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._whole(value)
        return type(value)(map(self.of, value)) if isinstance(value, tuple | list) else value

    def _whole(self, scores: Tensor) -> Tensor:
        scores = joined_blocks(scores, 1) if scores.dim() == 4 else scores
        heads = scores.shape[1] if scores.dim() == 4 else 0
        parts = torch.zeros(dist.get_world_size(self.group), dtype=torch.int64, device=scores.device)
        parts[dist.get_rank(self.group)] = heads
        dist.all_reduce(parts, group=self.group)
        parts = parts.tolist()
        if sum(parts) in self.head_counts:
            most = max(parts)
            padded = F.pad(scores, (0, 0, 0, 0, 0, most - heads))
            held = [rank * most + head for rank, count in enumerate(parts) for head in range(count)]
            whole = gather_from_region(padded, 1, self.group)
            return whole if len(held) == whole.shape[1] else whole[:, held]
        if set(parts) <= set(self.head_counts):  # all ranks run all heads
            return scores
        raise ValueError(
            f"{self.name} has {parts} heads on the ranks that share a layer, which do not make up "
            f"{sorted(self.head_counts)}; use output_attentions=False, or tp_size=1"
        )


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
