"""Split-gather sequence parallelism (arXiv 2205.05198, section 4.2).

Between the tensor-parallel regions of a layer every rank holds `[batch, seq/tp, hidden]`. The stack of layers is
entered with `enter` and left with `leave`; a tensor-parallel region starts with `gather` and ends with
`reduce_scatter`. A length that the axis does not divide is padded inside and trimmed again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.collectives import all_gather_dim, local_slice, reduce_scatter_dim
from shardformer.shard_spec import pad_to_multiple

_SEQ_DIM = 1  # tensors are [batch, seq, hidden]


class SequenceParallel:
    """The sequence-parallel region of one model on one mesh axis.

    Attributes:
        group: process group of the axis.
        length: sequence length of the pass in progress, before padding.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.length = 0

    def enter(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden], the same on every rank -> [batch, seq/tp, hidden]."""
        self.length = x.shape[_SEQ_DIM]
        return _Enter.apply(x, self)

    def leave(self, x: Tensor) -> Tensor:
        """[batch, seq/tp, hidden] -> [batch, seq, hidden], the same on every rank."""
        return _Leave.apply(x, self, self.length)

    def gather(self, x: Tensor) -> Tensor:
        """`g-bar`: [batch, seq/tp, hidden] -> [batch, seq, hidden], read by sharded weights."""
        return _GatherSequence.apply(x, self, self.length)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """`g-bar*`: partial sums [batch, seq, hidden] -> their sum's slice [batch, seq/tp, hidden]."""
        return _ReduceScatterSequence.apply(x, self)

    def pad(self, x: Tensor) -> Tensor:
        missing = pad_to_multiple(x.shape[_SEQ_DIM], self.world_size) - x.shape[_SEQ_DIM]
        return F.pad(x, (0, 0, 0, missing)) if missing else x

    def all_gather(self, x: Tensor, length: int) -> Tensor:
        return all_gather_dim(x, _SEQ_DIM, self.group)[:, :length].contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: SequenceParallel) -> Tensor:
        ctx.region, ctx.length = region, x.shape[_SEQ_DIM]
        return local_slice(region.pad(x), _SEQ_DIM, region.group).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.region.all_gather(grad, ctx.length), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: SequenceParallel, length: int) -> Tensor:
        ctx.region, ctx.length = region, length
        return region.all_gather(x, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # The first node of this region's backward: layers that are recomputed after it must see the length of their
        # own pass, which another micro-batch may have changed since.
        ctx.region.length = ctx.length
        return (local_slice(ctx.region.pad(grad), _SEQ_DIM, ctx.region.group).contiguous(), None, None)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: SequenceParallel, length: int) -> Tensor:
        ctx.region = region
        return region.all_gather(x, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (reduce_scatter_dim(ctx.region.pad(grad), _SEQ_DIM, ctx.region.group).contiguous(), None, None)


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: SequenceParallel) -> Tensor:
        ctx.region, ctx.length = region, x.shape[_SEQ_DIM]
        return reduce_scatter_dim(region.pad(x), _SEQ_DIM, region.group).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.region.all_gather(grad, ctx.length), None


def first_input(args: tuple, kwargs: dict, change: Any) -> tuple[tuple, dict]:
    """Apply `change` to the hidden states among a module's inputs, wherever the caller put them."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def gather_on_entry(module: nn.Module, region: SequenceParallel) -> None:
    """Let `module`, a tensor-parallel region, see the whole sequence."""
    module.register_forward_pre_hook(lambda _, args, kwargs: first_input(args, kwargs, region.gather), with_kwargs=True)


def wrap_layers(layers: list[nn.Module], region: SequenceParallel) -> None:
    """Enter the region before the first of `layers` and leave it after the last."""
    layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: first_input(args, kwargs, region.enter), with_kwargs=True
    )

    def leave(_: nn.Module, __: tuple, output: Any) -> Any:
        return (region.leave(output[0]), *output[1:]) if isinstance(output, tuple) else region.leave(output)

    layers[-1].register_forward_hook(leave)
