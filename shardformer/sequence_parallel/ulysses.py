"""All-to-all sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509).

In every layer a rank holds a slice of the sequence and whole weights. An all-to-all before the attention kernel gives
each rank the whole sequence for a subset of the heads; an all-to-all after it reverses this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shardformer.sequence_parallel.split_gather import SequenceParallel


class UlyssesAllToAll:
    """All-to-all exchange around attention in one sequence-parallel region.

    Args:
        region: defines this rank's slice of the sequence.
    """

    def __init__(self, region: SequenceParallel) -> None:
        self.region = region

    def to_heads(self, *projections: Tensor) -> tuple[Tensor, ...]:
        """[batch, heads, seq/tp, head_dim] -> [batch, heads/tp, seq, head_dim], without padding.

        Key/value heads fewer than ranks are repeated, so that every rank gets one.
        """
        size, length = self.region.world_size, self.region.length
        repeated = (repeated_for(x, size) for x in projections)
        return tuple(exchange_dims(x, 1, 2, self.region.group)[:, :, :length] for x in repeated)

    def to_sequence(self, found: Tensor) -> Tensor:
        """Exchange attention output back: [batch, seq, heads/tp, head_dim] -> [batch, seq/tp, heads, head_dim]."""
        missing = -found.shape[1] % self.region.world_size
        padded = F.pad(found, (0, 0, 0, 0, 0, missing)) if missing else found
        return exchange_dims(padded, 1, 2, self.region.group)


def exchange_dims(x: Tensor, split_dim: int, join_dim: int, group: ProcessGroup) -> Tensor:
    """All-to-all: split `split_dim` over the ranks and concatenate along `join_dim`; backward is the reverse."""
    return _Exchange.apply(x, split_dim, join_dim, group)


def repeated_for(x: Tensor, size: int) -> Tensor:
    """Repeat heads of [batch, heads, ...] that are fewer than `size`, so that every rank gets one."""
    return x if x.shape[1] % size == 0 else x.repeat_interleave(size // x.shape[1], 1)


class _Exchange(torch.autograd.Function):
    """All-to-all: split `split_dim` over the ranks and concatenate along `join_dim`; backward is the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split_dim: int, join_dim: int, group: ProcessGroup) -> Tensor:
        ctx.dims, ctx.group = (split_dim, join_dim), group
        return _exchange(x, split_dim, join_dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        split_dim, join_dim = ctx.dims
        return _exchange(grad, join_dim, split_dim, ctx.group), None, None, None


def _exchange(x: Tensor, split_dim: int, join_dim: int, group: ProcessGroup) -> Tensor:
    sent = torch.stack(x.chunk(dist.get_world_size(group), split_dim))  # [ranks, ...]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), join_dim)
