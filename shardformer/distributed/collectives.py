"""Differentiable collectives, the autograd functions that communicate; and the collectives that they are made of.

Names follow Megatron-LM (arXiv 1909.08053, section 3) and its sequence-parallel sequel (arXiv 2205.05198, section 4):
`f` copies forward and all-reduces backward, `g` all-reduces forward and copies backward; `g-bar` all-gathers the
sequence forward and reduce-scatters it backward, `g-bar*` does the reverse. Groups are passed, never global.

A region is what its ranks compute differently. `*_region` functions stand at its border: outside of it, the ranks have
the same values and the same gradients. A dim that the ranks do not divide is padded, and `length` trims it again.

Those of tensor and sequence parallelism are also traced: in a graph of a compiler, they are functional collectives.

Nodes that fuse communication with computation are elsewhere: `matmul/native.py`, `context_parallel/ring.py`
and `cross_entropy/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shardformer.distributed.blocks import BlockedTensor, blocks_of, copy_to_blocks, joined_blocks, reduce_from_blocks
from shardformer.shard_spec import ShardSpec
from shardformer.utils.untraced import saved_results, untraced

# torch 2.13 renames both; earlier releases have the old names only.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Collectives that compilers keep in a graph: they return new tensors, whose values are there after `_wait`.
_in_graph = torch.ops._c10d_functional
_wait = _in_graph.wait_tensor


def world_timeout() -> timedelta | None:
    """Return the timeout of the job's collectives; without it, `new_group` would use torch's default of 30 minutes."""
    backends = (dist.group.WORLD._get_backend(device) for device in dist.group.WORLD._device_types)
    options = (getattr(backend, "options", None) for backend in backends)
    return next((each._timeout for each in options if each is not None), None)


# ----- collectives without gradients -----


def pad_dim(x: Tensor, dim: int, multiple: int, fill: float = 0) -> Tensor:
    """Pad `dim`, counted from 0, at its end with `fill` to a multiple of `multiple`."""
    missing = -x.shape[dim] % multiple
    return F.pad(x, (0, 0) * (x.dim() - dim - 1) + (0, missing), value=fill) if missing else x


def local_slice(x: Tensor, dim: int, group: ProcessGroup, fill: float = 0) -> Tensor:
    """Return this rank's equal slice of `dim`, padded with `fill`, without communication."""
    size = dist.get_world_size(group)
    own = pad_dim(x, dim, size, fill).chunk(size, dim)[dist.get_rank(group)]
    return own.clone(memory_format=torch.contiguous_format)  # a copy also if it is contiguous, see `without_base`


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over ranks, outside of a graph in the memory of `x`."""
    if torch.compiler.is_compiling():
        return _wait(_in_graph.all_reduce(x, "sum", group.group_name))
    dist.all_reduce(x, group=group)
    return x


def all_gather_dim(x: Tensor, dim: int, group: ProcessGroup, length: int | None = None) -> Tensor:
    """Concatenate the equal slices of all ranks along `dim`; `length` is the size of `dim` without padding."""
    size = dist.get_world_size(group)
    if torch.compiler.is_compiling():  # inductor joins this very form with the products that read it
        parts = _wait(_in_graph.all_gather_into_tensor(x.contiguous(), size, group.group_name)).chunk(size)
        out = torch.cat(parts, dim)
        return out if length in (None, out.shape[dim]) else out.narrow(dim, 0, length).contiguous()
    shard = x.movedim(dim, 0).contiguous()
    out = shard.new_empty((size * shard.shape[0], *shard.shape[1:]))
    all_gather_flat(out, shard, group=group)
    out = out.movedim(0, dim)
    return without_base(out if length is None else out.narrow(dim, 0, length).contiguous())


def without_base(x: Tensor) -> Tensor:
    """Return a tensor of the same memory that is no view, so that a model may change it in place.

    Autograd refuses that for a view made in a custom function. Nothing else may read the memory of `x`.
    """
    return x.new_empty(0).set_(x)


def reduce_scatter_dim(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sum over ranks and keep this rank's equal slice of `dim`, padded with zeros."""
    if torch.compiler.is_compiling():
        size = dist.get_world_size(group)
        x = pad_dim(x, dim, size)
        x = torch.cat(x.chunk(size, dim)) if dim else x.contiguous()
        return _wait(_in_graph.reduce_scatter_tensor(x, "sum", size, group.group_name))
    out, full = _scatter_buffers(x, dim, group)
    reduce_scatter_flat(out, full, group=group)
    return out if dim == 0 else without_base(out.movedim(0, dim).contiguous())


def start_reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start `reduce_scatter_dim`; return the result, with `dim` moved to the front, and the work to wait for."""
    out, full = _scatter_buffers(x, dim, group)
    return out, reduce_scatter_flat(out, full, group=group, async_op=True)


def _scatter_buffers(x: Tensor, dim: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    size = dist.get_world_size(group)
    full = pad_dim(x, dim, size).movedim(dim, 0).contiguous()
    return full.new_empty((len(full) // size, *full.shape[1:])), full


def _exchange_rows(
    x: Tensor, sent: Sequence[int] | None, received: Sequence[int] | None, group: ProcessGroup
) -> Tensor:
    out, work = _start_exchange(x, sent, received, group)
    work.wait()
    return out


def _start_exchange(
    x: Tensor, sent: Sequence[int] | None, received: Sequence[int] | None, group: ProcessGroup
) -> tuple[Tensor, dist.Work]:
    out = x.new_empty((len(x) if received is None else sum(received), *x.shape[1:]))
    # Send bytes: gloo supports fewer dtypes than models use.
    given, taken = as_bytes(x), out.view(torch.uint8)
    return out, dist.all_to_all_single(taken, given, received, sent, group=group, async_op=True)


def _sum_shards(shard: Tensor, spec: ShardSpec, group: ProcessGroup) -> Tensor:
    whole = shard.new_zeros(spec.full_shape)
    spec.fill(whole, shard)
    dist.all_reduce(whole, group=group)
    return whole


def _of_last_dim(spec: ShardSpec, shape: Sequence[int]) -> ShardSpec:
    return replace(spec, full_shape=tuple(shape), dim=len(shape) - 1)


# ----- between a region and replicated computation -----


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group, ctx.length = dim, group, x.shape[dim]
        return local_slice(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_dim(grad, ctx.dim, ctx.group, ctx.length), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup, length: int | None) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather_dim(x, dim, group, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return local_slice(grad, ctx.dim, ctx.group), None, None, None


class _SplitFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: ShardSpec, group: ProcessGroup) -> Tensor:
        ctx.spec, ctx.group = _of_last_dim(spec, x.shape), group
        return ctx.spec.shard(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Summed: shards may differ in size, and several ranks may have read the same one.
        return _sum_shards(grad, ctx.spec, ctx.group), None, None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: ShardSpec, group: ProcessGroup) -> Tensor:
        ctx.spec = _of_last_dim(spec, (*x.shape[:-1], *spec.full_shape))
        return _sum_shards(x, ctx.spec, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.spec.shard(grad), None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        # On the CPU: reading the result must not wait for the device.
        counts = torch.zeros(size, dtype=torch.long)
        counts[rank] = len(x)
        dist.all_reduce(counts, group=group)
        counts = counts.tolist()
        padded = x.new_zeros((max(counts), *x.shape[1:]))
        padded[: len(x)] = x
        ctx.size, ctx.start, ctx.stop = size, sum(counts[:rank]), sum(counts[: rank + 1])
        parts = all_gather_dim(padded, 0, group).chunk(size)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.start : ctx.stop] * ctx.size, None


def copy_to_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Apply `f`: identity forward, all-reduce backward, because every rank reads the same input."""
    blocks = None if torch.compiler.is_compiling() else blocks_of(group)
    return _Copy.apply(x, group) if blocks is None else copy_to_blocks(x, blocks, group)


def reduce_from_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Apply `g`: all-reduce forward, identity backward, because every rank has the full gradient of the sum.

    In place: autograd must not need the value of `x` (true for a matmul's output).
    """
    if torch.compiler.is_compiling():
        return _Reduce.apply(x, group)
    if isinstance(x, BlockedTensor):
        return reduce_from_blocks(x, group)
    if saved_results.get() is not None:  # which may have saved this very memory
        x = x.clone()
    # No autograd node: passing the gradient through one would cost as much as the collective.
    dist.all_reduce(x.detach(), group=group)
    return x


def split_to_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Take this rank's equal slice of `dim`, padded with zeros, forward; all-gather backward."""
    return _Split.apply(x, dim, group)


def gather_from_region(x: Tensor, dim: int, group: ProcessGroup, length: int | None = None) -> Tensor:
    """All-gather along `dim` forward, to its size `length` without padding; take this rank's slice backward."""
    return _Gather.apply(joined_blocks(x, dim), dim, group, length)


@untraced
def split_features(x: Tensor, spec: ShardSpec, group: ProcessGroup) -> Tensor:
    """Take this rank's shard, by `spec`, of the last dim of [..., features]; sum the whole gradient backward."""
    return _SplitFeatures.apply(x, spec, group)


@untraced
def gather_features(x: Tensor, spec: ShardSpec, group: ProcessGroup) -> Tensor:
    """Assemble shards, by `spec`, of the last dim of [..., features] forward; take this rank's one backward."""
    return _GatherFeatures.apply(x, spec, group)


@untraced
def gather_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """Gather the rows of all ranks, of any numbers; each keeps its rows' gradient, to be weighted 1 / ranks."""
    return _GatherRows.apply(x, group)


# ----- inside a region: every rank computes something different on both sides -----


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: ProcessGroup, length: int | None, gathered: Tensor | None
    ) -> Tensor:
        ctx.dim, ctx.group = dim, group
        if gathered is None:
            return all_gather_dim(x, dim, group, length)
        # A copy, for others read `gathered`.
        return gathered.movedim(0, dim).narrow(dim, 0, length).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return reduce_scatter_dim(grad, ctx.dim, ctx.group), None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group, ctx.length = dim, group, x.shape[dim]
        return reduce_scatter_dim(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_dim(grad, ctx.dim, ctx.group, ctx.length), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: Sequence[int] | None, received: Sequence[int] | None, group: ProcessGroup
    ) -> Tensor:
        ctx.sizes, ctx.group = (received, sent), group
        return _exchange_rows(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange_rows(grad, *ctx.sizes, ctx.group), None, None, None


class RowExchange:
    """An exchange of rows that goes on while others compute, in both passes; see `all_to_all_uneven`.

    What is computed between `start` and `finish` in the forward pass is between the reverse exchange's start and end in
    the backward pass: autograd runs the latest node that is ready.

    Args:
        sent, received: rows to and from each rank of the group.
    """

    def __init__(self, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> None:
        self.sent, self.received, self.group = sent, received, group
        self.work: dist.Work | None = None
        self.coming: Tensor | None = None  # gradients of the rows that were sent

    def start(self, x: Tensor) -> Tensor:
        """Start to send rows; the result is for `finish` alone."""
        return _StartRows.apply(x, self)

    def finish(self, rows: Tensor) -> Tensor:
        """Wait for the rows, [sum of `received`, features]."""
        return _FinishRows.apply(rows, self)


class _StartRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        out, exchange.work = _start_exchange(x, exchange.sent, exchange.received, exchange.group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.work.wait()
        found, exchange.coming = exchange.coming, None
        return found, None


class _FinishRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.work.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.coming, exchange.work = _start_exchange(grad, exchange.received, exchange.sent, exchange.group)
        return grad, None  # has as many rows as came; `_StartRows` takes the others


def all_gather(
    x: Tensor, dim: int, group: ProcessGroup, length: int | None = None, gathered: Tensor | None = None
) -> Tensor:
    """Apply `g-bar`: all-gather along `dim` forward, reduce-scatter backward.

    Args:
        length: size of `dim` without padding.
        gathered: the slices of all ranks with `dim` in front, if they have been gathered already.
    """
    return _AllGather.apply(x, dim, group, length, gathered)


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Apply `g-bar*`: reduce-scatter along `dim`, padded with zeros, forward; all-gather backward."""
    return _ReduceScatter.apply(x, dim, group)


@untraced
def all_to_all(x: Tensor, split_dim: int, join_dim: int, group: ProcessGroup) -> Tensor:
    """Split `split_dim` over the ranks and concatenate along `join_dim`; backward is the reverse exchange."""
    sent = torch.stack(x.chunk(dist.get_world_size(group), split_dim))  # [ranks, ...]
    return torch.cat(_AllToAll.apply(sent, None, None, group).unbind(), join_dim)


@untraced
def all_to_all_uneven(x: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    """Exchange rows, [sum of `sent`, features] -> [sum of `received`, features]; backward is the reverse exchange."""
    return _AllToAll.apply(x, sent, received, group)


def as_bytes(x: Tensor) -> Tensor:
    """Return [..., size] as uint8, [..., size * itemsize]: a view where the values are dense in memory, or else a copy.

    torch counts a dim of one element as contiguous whatever its stride is, but takes no such tensor as bytes: a column
    of a batch of one row.
    """
    dense = x.contiguous()
    if dense.stride(-1) != 1:
        dense = dense.clone(memory_format=torch.contiguous_format)
    return dense.view(torch.uint8)
