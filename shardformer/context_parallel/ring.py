"""Ring attention (Liu et al., arXiv 2310.01889): keys and values move around the ring, queries stay.

Each rank sends its current keys and values to the next rank while it attends to them. After as many steps as there are
ranks, its queries have attended to all keys. The backward pass sends them again, and their gradients one step behind.

Attention between a block of queries and a block of keys, as one part of a softmax over more keys.

Each kernel returns the output for the block's keys alone, and the logarithm of the sum of their exponentials, which
`merge` uses to combine blocks. The backward pass of a block takes the output and the log-sum-exp of the *whole*
softmax and returns the block's exact share of the gradients (FlashAttention-2, arXiv 2307.08691, section 3.1.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardformer.attention import log_once
from shardformer.attention.backend import AMPERE, HALF, Capability, capability_of, has_backward_of_large_heads
from shardformer.utils.untraced import computed_once, untraced

_aten = torch.ops.aten


@dataclass(frozen=True)
class Block:
    """A block of queries and the block of keys that they attend to."""

    # queries, keys: ranges within the local queries and keys
    queries: slice
    keys: slice
    is_causal: bool = False  # query i sees the keys up to number i of the block, which has as many keys as queries
    # [batch or 1, heads or 1, queries, keys] bool, True where a query sees a key; None for everywhere
    allowed: Tensor | None = None
    rows: slice = field(default_factory=partial(slice, None))
    is_flipped: bool = False  # query i sees the keys from number i on instead, as at the far edge of a window


@dataclass(frozen=True)
class Softmax:
    """Parameters that turn scores into weights."""

    scale: float  # factor of the scores
    dropout: float = 0.0  # probability that a weight is dropped
    seed: int = 0  # seed of the dropout mask, different for each block


class Gradients(NamedTuple):
    """Gradients of a block's queries, keys and values."""

    query: Tensor
    key: Tensor
    value: Tensor


def with_dense_heads(x: Tensor) -> Tensor:
    """Return `x`, [..., head_dim], with heads contiguous, without which torch's fused kernels misread."""
    return x if x.stride(-1) == 1 else x.contiguous()


def attend(query: Tensor, key: Tensor, value: Tensor, block: Block, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Attend to the block's keys: return [batch, heads, queries, head_dim] and log-sum-exps [batch, heads, queries].

    Args:
        query: [batch, heads, queries, head_dim], of the block.
        key, value: [batch, key/value heads, keys, head_dim]; the number of heads divides that of the query.

    All must be `with_dense_heads`. A query that sees no key gets zero, and log-sum-exp minus infinity.
    """
    if block.is_flipped:  # causal in the opposite order, which all kernels know
        found, logs = attend(*_flipped(query, key, value), replace(block, is_flipped=False), softmax)
        return found.flip(2), logs.flip(2)
    if _has_cpu_kernel(query, value, softmax):
        found, logs = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, block.is_causal, attn_mask=_additive(block, query.dtype), scale=softmax.scale
        )
        if block.allowed is not None:
            logs = logs.masked_fill(~block.allowed.any(-1), -math.inf)
        return found, logs
    if _has_cuda_kernel(query, value, block, softmax):
        return _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, block.is_causal, False, scale=softmax.scale
        )[:2]
    scores = _scores(query, key, block, softmax)
    logs = scores.logsumexp(-1)
    weights = (scores - _finite(logs)[..., None]).exp()
    weights = _dropped(weights, softmax)
    return _split(_joined(weights, value) @ value.to(weights.dtype), query).to(query.dtype), logs


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    found: Tensor,
    logs: Tensor,
    block: Block,
    softmax: Softmax,
) -> Gradients:
    """Return the block's share of the gradients.

    Args:
        grad, found: [batch, heads, queries, head_dim], gradient and value of the output over all keys. Like query, key
            and value, they must be `with_dense_heads`.
        logs: [batch, heads, queries], log-sum-exps over all keys; finite.
    """
    if block.is_flipped:
        parts = _flipped(grad, query, key, value, found, logs)
        return Gradients(*_flipped(*attend_backward(*parts, replace(block, is_flipped=False), softmax)))
    if _has_cpu_kernel(query, value, softmax):
        return Gradients(
            *_aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad,
                query,
                key,
                value,
                found,
                logs,
                0.0,
                block.is_causal,
                attn_mask=_additive(block, query.dtype),
                scale=softmax.scale,
            )
        )
    if _has_cuda_kernel(query, value, block, softmax):
        return _cuda_backward(grad, query, key, value, found, logs, block, softmax)
    weights = (_scores(query, key, block, softmax) - logs[..., None]).exp()
    kept = _dropped(torch.ones_like(weights), softmax)
    grad, found = grad.to(weights.dtype), found.to(weights.dtype)
    grad_rows = _joined(grad, value)
    through = _split(grad_rows @ value.to(weights.dtype).transpose(-1, -2), query) * kept
    grad_scores = weights * (through - (grad * found).sum(-1, keepdim=True)) * softmax.scale
    score_rows = _joined(grad_scores, key)
    return Gradients(
        _split(score_rows @ key.to(weights.dtype), query),
        score_rows.transpose(-1, -2) @ _joined(query, key).to(weights.dtype),
        _joined(weights * kept, value).transpose(-1, -2) @ grad_rows,
    )


def _flipped(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Turn the order of tokens around, [batch, heads, tokens, ...]."""
    return tuple(each.flip(2) for each in tensors)


def merge(found: Tensor, logs: Tensor, more: Tensor, more_logs: Tensor) -> None:
    """Merge `more` into `found`, [batch, heads, queries, head_dim], in place, by their logs [batch, heads, queries]."""
    both = torch.logaddexp(logs, more_logs)
    safe = _finite(both)
    found.mul_((logs - safe).exp()[..., None]).add_(more * (more_logs - safe).exp()[..., None].to(found.dtype))
    logs.copy_(both)


def _finite(logs: Tensor) -> Tensor:
    """Replace minus infinity (the logarithm of zero keys) by 0: a difference of two infinities is NaN."""
    return logs.masked_fill(logs == -math.inf, 0.0)


def _has_cpu_kernel(query: Tensor, value: Tensor, softmax: Softmax) -> bool:
    return query.device.type == "cpu" and not softmax.dropout and query.shape[-1] == value.shape[-1]


def _has_cuda_kernel(query: Tensor, value: Tensor, block: Block, softmax: Softmax) -> bool:
    if query.device.type != "cuda" or block.allowed is not None or softmax.dropout:
        return False  # docs/context_parallelism.md says so
    reason = _not_served_on_gpu(query, value, capability_of(query.device))
    if reason:
        log_once("ring attention", f"runs a plain kernel: {reason}")
    return not reason


def _not_served_on_gpu(query: Tensor, value: Tensor, capability: Capability | None) -> str:
    """Return why torch's flash kernel does not serve a block without masks; empty if it does."""
    size = query.shape[-1]
    if torch.cuda.is_available() and not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash kernel"
    if query.dtype not in HALF:
        return f"torch's flash kernel runs in 16 bit, not in {query.dtype}"
    if capability is not None and capability < AMPERE:
        return "torch's flash kernel needs a GPU of compute capability 8.0 (Ampere) or more"
    if size != value.shape[-1] or size > 256 or size % 8:
        return f"torch's flash kernel takes equal head sizes up to 256 that 8 divides, not {size}, {value.shape[-1]}"
    if not has_backward_of_large_heads(size, capability):
        return f"torch's flash kernel has no backward pass for heads of size {size} on this GPU"
    return ""


def _cuda_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    found: Tensor,
    logs: Tensor,
    block: Block,
    softmax: Softmax,
) -> Gradients:
    lengths, unused = (query.shape[2], key.shape[2]), torch.empty(0, dtype=torch.int64, device=query.device)
    of_query, of_key, of_value = _aten._scaled_dot_product_flash_attention_backward(
        grad.to(query.dtype).contiguous(),
        query,
        key,
        value,
        found.contiguous(),
        logs.contiguous(),
        None,
        None,
        *lengths,
        0.0,
        block.is_causal,
        unused,
        unused,
        scale=softmax.scale,
    )
    return Gradients(of_query, of_key, of_value)


def _additive(block: Block, dtype: torch.dtype) -> Tensor | None:
    if block.allowed is None:
        return None
    return torch.zeros_like(block.allowed, dtype=dtype).masked_fill(~block.allowed, -math.inf)


def _scores(query: Tensor, key: Tensor, block: Block, softmax: Softmax) -> Tensor:
    """Return scores [batch, heads, queries, keys] in at least fp32, minus infinity where masked."""
    precise = torch.promote_types(query.dtype, torch.float32)
    rows = _joined(query, key).to(precise) @ key.to(precise).transpose(-1, -2)
    scores = _split(rows, query) * softmax.scale
    if block.is_causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(above, -math.inf)
    return scores if block.allowed is None else scores.masked_fill(~block.allowed, -math.inf)


def _dropped(weights: Tensor, softmax: Softmax) -> Tensor:
    """Apply dropout to the weights; the same seed gives the same mask."""
    if not softmax.dropout:
        return weights
    generator = torch.Generator(weights.device).manual_seed(softmax.seed)
    kept = torch.rand(weights.shape, generator=generator, device=weights.device) >= softmax.dropout
    return weights * kept / (1 - softmax.dropout)


def repeated(x: Tensor, query: Tensor) -> Tensor:
    """Repeat key/value heads so that there is one for each head of the query."""
    groups = query.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _joined(x: Tensor, key: Tensor) -> Tensor:
    """Put the heads of [batch, heads, queries, any] that read one key/value head behind each other, as its rows."""
    return x if x.shape[1] == key.shape[1] else x.unflatten(1, (key.shape[1], -1)).flatten(2, 3)


def _split(rows: Tensor, query: Tensor) -> Tensor:
    """Undo `_joined`: [batch, key/value heads, rows, any] -> [batch, heads, queries, any]."""
    return rows if rows.shape[1] == query.shape[1] else rows.unflatten(2, (-1, query.shape[2])).flatten(1, 2)


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
        sinks: [heads], a score of each head that has no value (`shardformer/attention/registry.py`); None for none.

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
        found, logs = computed_once(partial(_attend_around, query, key, value, sinks, blocks, softmax, group))
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
                q, k = (block.rows, slice(None), block.queries), (block.rows, slice(None), block.keys)
                parts = (grad[q], query[q], keys[k], values[k], found[q], logs[q])
                of = attend_backward(*parts, block, _seeded(ctx.softmax, source, number))
                grad_query[q] += of.query
                grad_keys[k] += of.key
                grad_values[k] += of.value
            held = ring.received(coming) if coming else held
            if travelling is not None:
                grad_held += ring.received(travelling)
            travelling = ring.pass_on(grad_held)
        grad_key, grad_value = ring.received(travelling).split(sizes, -1)  # back at the rank that holds the keys
        grads = grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)
        return *grads, None if sinks is None else _grad_of_sinks(grad, found, logs, sinks), None, None, None


def _attend_around(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    blocks: Blocks,
    softmax: Softmax,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Return what `ring_attention` does, and log-sum-exps, [batch, heads, part]."""
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
            q, k = (block.rows, slice(None), block.queries), (block.rows, slice(None), block.keys)
            parts = (query[q], keys[k], values[k])
            merge(found[q], logs[q], *attend(*parts, block, _seeded(softmax, source, number)))
        held = ring.received(coming) if coming else held
    if sinks is not None:
        merge(found, logs, found.new_zeros(()), sinks.to(logs.dtype)[:, None].expand_as(logs))
    return found.to(query.dtype), logs


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
    if not softmax.dropout:
        return softmax
    further, number = divmod(number, 16)
    return replace(softmax, seed=softmax.seed + 16 * source + number + (further << 32))
