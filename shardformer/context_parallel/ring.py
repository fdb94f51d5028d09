"""Ring attention (Liu et al., arXiv 2310.01889): keys and values travel around, queries stay.

Every rank sends the keys and values it has to the next one while it attends to them; after as many steps as there are
ranks its queries have met all keys. In the backward pass they travel again, and their gradients one step behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardformer.context_parallel.blockwise import Block, Softmax, attend, attend_backward, merge, with_dense_heads

# Rank that the keys come from -> the blocks in which they meet this rank's queries.
Blocks = Callable[[int], Sequence[Block]]


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, softmax: Softmax, group: ProcessGroup
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        query: [batch, heads, part, head_dim].
        key, value: [batch, key/value heads, part, head_dim], this rank's.
        blocks: which of them meet.

    Returns:
        [batch, heads, part, head_dim]; zero for a query that sees no key.
    """
    dense = map(with_dense_heads, (query, key, value))
    return _RingAttention.apply(*dense, blocks, softmax, group)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, softmax: Softmax, group: ProcessGroup
    ) -> Tensor:
        precise = torch.promote_types(query.dtype, torch.float32)
        rows, heads, length, _ = query.shape
        # In memory as [batch, part, heads, head_dim], which the projection behind it reads: one copy serves both.
        found = query.new_zeros((rows, length, heads, value.shape[-1]), dtype=precise).transpose(1, 2)
        logs = found.new_full(query.shape[:-1], -torch.inf)
        held, ring = torch.cat([key, value], -1), _Ring(group)
        for step in range(ring.size):
            coming = ring.pass_on(held) if step < ring.size - 1 else None
            keys, values = held.split([key.shape[-1], value.shape[-1]], -1)
            source = ring.source(step)
            for number, block in enumerate(blocks(source)):
                q, k = block.queries, block.keys
                parts = (query[:, :, q], keys[:, :, k], values[:, :, k])
                merge(found[:, :, q], logs[:, :, q], *attend(*parts, block, _seeded(softmax, source, number)))
            held = ring.received(coming) if coming else held
        found = found.to(query.dtype)
        ctx.save_for_backward(query, key, value, found, logs)
        ctx.blocks, ctx.softmax, ctx.group = blocks, softmax, group
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, found, logs = ctx.saved_tensors
        grad, logs = with_dense_heads(grad), logs.masked_fill(logs == -torch.inf, 0.0)
        sizes = [key.shape[-1], value.shape[-1]]
        grad_query = torch.zeros_like(query, dtype=logs.dtype)
        held, ring = torch.cat([key, value], -1), _Ring(ctx.group)
        travelling: Any = None  # the gradients of `held` that ranks before this one found
        for step in range(ring.size):
            coming = ring.pass_on(held) if step < ring.size - 1 else None
            grad_held = torch.zeros_like(held, dtype=logs.dtype)
            keys, values = held.split(sizes, -1)
            grad_keys, grad_values = grad_held.split(sizes, -1)
            source = ring.source(step)
            for number, block in enumerate(ctx.blocks(source)):
                q, k = block.queries, block.keys
                parts = (grad[:, :, q], query[:, :, q], keys[:, :, k], values[:, :, k], found[:, :, q], logs[:, :, q])
                of = attend_backward(*parts, block, _seeded(ctx.softmax, source, number))
                grad_query[:, :, q] += of.query
                grad_keys[:, :, k] += of.key
                grad_values[:, :, k] += of.value
            held = ring.received(coming) if coming else held
            if travelling is not None:
                grad_held += ring.received(travelling)
            travelling = ring.pass_on(grad_held)
        grad_key, grad_value = ring.received(travelling).split(sizes, -1)  # home again
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


class _Ring:
    """The ranks of a group, each beside the next."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def source(self, step: int) -> int:
        """The rank whose keys are here after so many steps."""
        return (self.rank - step) % self.size

    def pass_on(self, x: Tensor) -> tuple[Tensor, Tensor, list[Any]]:
        """Begin to send `x` to the next rank and to receive from the one before; `x` must not change until received."""
        x = x.contiguous()
        if self.size == 1:
            return x, x, []
        received = torch.empty_like(x)
        ahead, behind = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        operations = [
            dist.P2POp(dist.isend, x, group=self.group, group_peer=ahead),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=behind),
        ]
        return x, received, dist.batch_isend_irecv(operations)

    @staticmethod
    def received(travelling: tuple[Tensor, Tensor, list[Any]]) -> Tensor:
        _, received, works = travelling
        for work in works:
            work.wait()
        return received


def _seeded(softmax: Softmax, source: int, number: int) -> Softmax:
    return replace(softmax, seed=softmax.seed + 16 * source + number) if softmax.dropout else softmax
