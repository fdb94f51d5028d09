"""The autograd pairs at the border of a tensor-parallel region that is computed in blocks; see `collectives.py`.

`f` gives each block the same value and adds up the gradients of all blocks, `g` the reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardformer.distributed.blocked_tensor import BlockedTensor
from shardformer.distributed.blocks import Blocks, sum_over_blocks

_ALIGNMENT = {"cpu": 64, "cuda": 512}  # bytes; torch aligns the memory of a tensor of its own so


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, group: ProcessGroup) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return sum_over_blocks(grads, ctx.group), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *parts: Tensor) -> Tensor:
        ctx.count = len(parts)
        return sum_over_blocks(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *[grad] * ctx.count)


class _Split(torch.autograd.Function):
    """One parameter as one tensor a block, in memory of its own."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dim: int, slices: Sequence[Sequence[slice]]) -> tuple[Tensor, ...]:
        ctx.dim, ctx.slices, ctx.shape = dim, slices, weight.shape
        return tuple(block_of(weight, dim, each) for each in slices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        whole = grads[0].new_empty(ctx.shape)
        for grad, each in zip(grads, ctx.slices, strict=True):
            write_block(whole, ctx.dim, each, grad)
        return whole, None, None


def copy_to_blocks(x: Tensor, blocks: Blocks, group: ProcessGroup) -> BlockedTensor:
    """Apply `f`: every block reads the same input, and the gradient of the input is the sum over all blocks."""
    return BlockedTensor(_Copy.apply(x, len(blocks.local), group), blocks)


def reduce_from_blocks(x: BlockedTensor, group: ProcessGroup) -> Tensor:
    """Apply `g`: add up all blocks; each of them gets the gradient of the sum."""
    return _Sum.apply(group, *x.blocks)


def joined_blocks(x: Tensor, dim: int) -> Tensor:
    """Return what a rank would have computed at once: its blocks behind one another along `dim`."""
    return torch.cat(x.blocks, dim) if isinstance(x, BlockedTensor) else x


def divided_by_heads(x: Tensor, blocks: Blocks) -> BlockedTensor:
    """Return [batch, local heads, ...] as blocks, the reverse of `joined_blocks`."""
    return BlockedTensor([part.contiguous() for part in x.chunk(len(blocks.local), 1)], blocks)


def split_parameter(weight: Tensor, dim: int, slices: Sequence[Sequence[slice]], blocks: Blocks) -> BlockedTensor:
    """Return a parameter's shard as blocks along `dim`, which do not overlap; see `Blocks.slices`."""
    return BlockedTensor(_Split.apply(weight, dim, slices), blocks)


def block_of(weight: Tensor, dim: int, slices: Sequence[slice]) -> Tensor:
    """Copy a block out of a shard: how a kernel rounds may depend on strides and on where its memory begins."""
    return torch.cat([weight.narrow(dim, each.start, each.stop - each.start) for each in slices], dim)


def block_to_read(weight: Tensor, dim: int, slices: Sequence[slice]) -> Tensor:
    """Return a block of a shard: a view that lies in memory as a copy would, else a copy."""
    if len(slices) == 1:
        view = weight.narrow(dim, slices[0].start, slices[0].stop - slices[0].start)
        if view.is_contiguous() and view.data_ptr() % _ALIGNMENT[view.device.type] == 0:
            return view
    return block_of(weight, dim, slices)


def write_block(whole: Tensor, dim: int, slices: Sequence[slice], block: Tensor) -> None:
    """Copy a block to its place in a shard."""
    parts = block.split([each.stop - each.start for each in slices], dim)
    for each, part in zip(slices, parts, strict=True):
        whole.narrow(dim, each.start, each.stop - each.start).copy_(part)
