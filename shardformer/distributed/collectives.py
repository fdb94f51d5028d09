"""Collectives of tensor and sequence parallelism as autograd functions.

Names follow Megatron-LM (arXiv 1909.08053, section 3) and its sequence-parallel sequel (arXiv 2205.05198, section 4):
`f` copies forward and all-reduces backward, `g` all-reduces forward and copies backward; `g-bar` all-gathers the
sequence forward and reduce-scatters it backward, `g-bar*` does the reverse. Groups are passed, never global.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardformer.shard_spec import ShardSpec

# torch 2.13 renames both; earlier releases have the old names only.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def world_timeout() -> timedelta | None:
    """Return the timeout of the job's collectives; without it, `new_group` would use torch's default of 30 minutes."""
    backends = (dist.group.WORLD._get_backend(device) for device in dist.group.WORLD._device_types)
    options = (getattr(backend, "options", None) for backend in backends)
    return next((each._timeout for each in options if each is not None), None)


def all_gather_dim(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Concatenate the equal shards of all ranks along `dim`."""
    world_size = dist.get_world_size(group)
    shard = x.movedim(dim, 0).contiguous()
    out = shard.new_empty((world_size * shard.shape[0], *shard.shape[1:]))
    all_gather_flat(out, shard, group=group)
    return out.movedim(0, dim)


def reduce_scatter_dim(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sum over ranks and keep this rank's equal slice of `dim`."""
    world_size = dist.get_world_size(group)
    full = x.movedim(dim, 0).contiguous()
    out = full.new_empty((full.shape[0] // world_size, *full.shape[1:]))
    reduce_scatter_flat(out, full, group=group)
    return out.movedim(0, dim)


def local_slice(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's equal slice of `dim`, without communication."""
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


class _Copy(torch.autograd.Function):
    """`f`: every rank reads the same input, so the input's gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Gather(torch.autograd.Function):
    """All-gather shards of `dim` to the whole tensor on every rank; later computation is replicated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather_dim(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return local_slice(grad, ctx.dim, ctx.group).contiguous(), None, None


class _Split(torch.autograd.Function):
    """Read this rank's features of a replicated input; the backward pass assembles the gradient of the whole input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, start: int, stop: int, group: ProcessGroup) -> Tensor:
        ctx.shape, ctx.start, ctx.stop, ctx.group = x.shape, start, stop, group
        return x[..., start:stop].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # All-reduce instead of all-gather: shards may differ in size.
        whole = grad.new_zeros(ctx.shape)
        whole[..., ctx.start : ctx.stop] = grad
        dist.all_reduce(whole, group=ctx.group)
        return whole, None, None, None


class _GatherRows(torch.autograd.Function):
    """Gather rows of all ranks, whose numbers may differ; each rank keeps the gradient of its own rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        counts = torch.empty(size, dtype=torch.long, device=x.device)
        all_gather_flat(counts, torch.tensor([len(x)], device=x.device), group=group)
        counts = counts.tolist()
        padded = x.new_zeros((max(counts), *x.shape[1:]))
        padded[: len(x)] = x
        ctx.size, ctx.start, ctx.stop = size, sum(counts[:rank]), sum(counts[: rank + 1])
        parts = all_gather_dim(padded, 0, group).chunk(size)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.start : ctx.stop] * ctx.size, None


class _CutFeatures(torch.autograd.Function):
    """Read this rank's features of a replicated input, as defined by a `ShardSpec` of the last dim."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: ShardSpec, group: ProcessGroup) -> Tensor:
        ctx.spec, ctx.group = _of_last_dim(spec, x.shape), group
        return ctx.spec.shard(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Summed: shards may differ in size, and several ranks may have read the same one.
        return _put_together(grad, ctx.spec, ctx.group), None, None


class _JoinFeatures(torch.autograd.Function):
    """Assemble the shards of `_CutFeatures` to the whole tensor on every rank; later computation is replicated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: ShardSpec, group: ProcessGroup) -> Tensor:
        ctx.spec = _of_last_dim(spec, (*x.shape[:-1], *spec.full_shape))
        return _put_together(x, ctx.spec, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.spec.shard(grad), None, None


def _of_last_dim(spec: ShardSpec, shape: Sequence[int]) -> ShardSpec:
    return replace(spec, full_shape=tuple(shape), dim=len(shape) - 1)


def _put_together(piece: Tensor, spec: ShardSpec, group: ProcessGroup) -> Tensor:
    whole = piece.new_zeros(spec.full_shape)
    spec.fill(whole, piece)
    dist.all_reduce(whole, group=group)
    return whole


def copy_to_axis(x: Tensor, group: ProcessGroup) -> Tensor:
    """Apply `f`: identity forward, all-reduce backward."""
    return _Copy.apply(x, group)


def reduce_from_axis(x: Tensor, group: ProcessGroup) -> Tensor:
    """Apply `g`: all-reduce forward, identity backward, because every rank has the full gradient of the sum.

    In place: autograd must not need the value of `x` (true for a matmul's output).
    """
    # No autograd node: passing the gradient through one would cost as much as the collective.
    dist.all_reduce(x.detach(), group=group)
    return x


def gather_from_axis(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """All-gather along `dim` forward, take this rank's slice backward."""
    return _Gather.apply(x, dim, group)


def gather_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """Gather the rows of all ranks, [sum of rows, ...]; each rank must weight what it computes by 1 / ranks."""
    return _GatherRows.apply(x, group)


def split_to_axis(x: Tensor, start: int, stop: int, group: ProcessGroup) -> Tensor:
    """Take features `start:stop` of the last dim forward; all-reduce the assembled gradient backward."""
    return _Split.apply(x, start, stop, group)


def cut_features(x: Tensor, spec: ShardSpec, group: ProcessGroup) -> Tensor:
    """Return this rank's shard of the last dim of [..., features]; `spec`, of one dim, defines the sharding."""
    return _CutFeatures.apply(x, spec, group)


def join_features(x: Tensor, spec: ShardSpec, group: ProcessGroup) -> Tensor:
    """Assemble distinct shards of the last dim to [..., features] on every rank."""
    return _JoinFeatures.apply(x, spec, group)
