"""Ring attention (Liu et al., arXiv 2310.01889): keys and values move around the ring, queries stay.

Each rank sends its current keys and values to the next rank while it attends to them. After as many steps as there are
ranks, its queries have attended to all keys. The backward pass sends them again, and their gradients one step behind.
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
from shardformer.utils.untraced import untraced

# Source rank of the keys -> the blocks in which this rank's queries attend to them.
Blocks = Callable[[int], Sequence[Block]]


@untraced
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Blocks,
    softmax: Softmax,
    group: ProcessGroup,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with this rank's queries to the keys of all ranks.

    Args:
        query: [batch, heads, part, head_dim].
        key, value: [batch, key/value heads, part, head_dim], of this rank.
        blocks: source rank -> the blocks in which queries attend to its keys.
        sinks: [heads], a score of each head that has no value (`shardformer/attention/sinks.py`); None for none.

    Returns:
        [batch, heads, part, head_dim]; zero for a query that sees no key.
    """
    dense = map(with_dense_heads, (query, key, value))
    return _RingAttention.apply(*dense, sinks, blocks, softmax, group)


# Not in `distributed/collectives.py`: it sends keys and values while it attends to those that arrived before.
class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        blocks: Blocks,
        softmax: Softmax,
        group: ProcessGroup,
    ) -> Tensor:
        precise = torch.promote_types(query.dtype, torch.float32)
        rows, heads, length, _ = query.shape
        # Memory layout [batch, part, heads, head_dim], which the output projection reads: saves a copy.
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
        if sinks is not None:
            merge(found, logs, found.new_zeros(()), sinks.to(logs.dtype)[:, None].expand_as(logs))
        found = found.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, found, logs)
        ctx.blocks, ctx.softmax, ctx.group = blocks, softmax, group
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, found, logs = ctx.saved_tensors
        grad, logs = with_dense_heads(grad), logs.masked_fill(logs == -torch.inf, 0.0)
        sizes = [key.shape[-1], value.shape[-1]]
        grad_query = torch.zeros_like(query, dtype=logs.dtype)
        held, ring = torch.cat([key, value], -1), _Ring(ctx.group)
        travelling: Any = None  # gradients of `held` from the previous ranks
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
        grad_key, grad_value = ring.received(travelling).split(sizes, -1)  # back at the rank that holds the keys
        grads = grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)
        return *grads, None if sinks is None else _grad_of_sinks(grad, found, logs, sinks), None, None, None


def _grad_of_sinks(grad: Tensor, found: Tensor, logs: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks, [heads]: of a weight of the softmax that is multiplied with a value of zero.

    Args:
        grad, found: [batch, heads, queries, head_dim], gradient and value of the output.
        logs: [batch, heads, queries], log-sum-exps with the sinks.
    """
    weights = (sinks.to(logs.dtype)[:, None] - logs).exp()
    return -(weights * (grad.to(logs.dtype) * found.to(logs.dtype)).sum(-1)).sum((0, 2)).to(sinks.dtype)


class _Ring:
    """The ranks of a group, connected in a ring."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def source(self, step: int) -> int:
        """Return the rank whose keys are held here after `step` steps."""
        return (self.rank - step) % self.size

    def pass_on(self, x: Tensor) -> tuple[Tensor, Tensor, list[Any]]:
        """Start to send `x` to the next rank and receive from the previous one; do not change `x` until received."""
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
