"""Autograd nodes of column-parallel linear layers that overlap communication with matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardformer.distributed.collectives import all_gather_dim, reduce_scatter_dim, without_base
from shardformer.matmul.weight_grad import autocast, matrix, weight_gradient
from shardformer.sequence_parallel.split_gather import PendingGather
from shardformer.utils.untraced import computed_once


class GatheredLinear(torch.autograd.Function):
    """y_i = gather(x) W_i^T + b_i for several i, with communication overlapped by the products (sequence overlap).

    Forward, the rank's own tokens are multiplied while other ranks' tokens arrive. Backward, the input gradient is
    reduce-scattered while the weight gradients are computed.
    """

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, pending: PendingGather, layer: Any, count: int, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Compute the outputs of all layers, each [batch, seq, out]."""
        weights, biases = tensors[:count], tensors[count:]
        ctx.backend, ctx.store = layer.kernel, layer.weight_grad_store
        (local_x,) = autocast(pending.own)
        own = [ctx.backend.forward(local_x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        (gathered,) = autocast(pending.wait())  # [seq, batch, in]
        outputs = []
        for weight, bias, part in zip(weights, biases, own, strict=True):
            out = part.new_empty((*gathered.shape[:-1], part.shape[-1]))
            out[pending.rows] = part
            for rows in pending.other_rows:
                out[rows] = ctx.backend.forward(gathered[rows], weight, bias)
            outputs.append(without_base(out.movedim(0, 1)[:, : pending.length].contiguous()))
        ctx.pending_region, ctx.length, ctx.count = pending.region, pending.length, count
        ctx.save_for_backward(gathered, *weights)
        ctx.weights = weights  # saved tensors do not record whose transposes they are
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Sum the input gradients of all layers, and start their reduction before the weight gradients are computed."""
        gathered, *weights = ctx.saved_tensors
        region, needs = ctx.pending_region, ctx.needs_input_grad
        grad_x, work = None, None
        if needs[0]:
            whole = ctx.backend.grad_input(matrix(grads[0]), weights[0])
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                ctx.backend.add_grad_input(whole, matrix(grad), weight)
            grad_x, work = region.start_reduce_scatter(whole.unflatten(0, grads[0].shape[:-1]))  # [batch, seq, in]
        flat_x = matrix(gathered[: ctx.length].movedim(0, 1))
        flat = [matrix(grad) for grad in grads]
        needs_weights, needs_biases = needs[4 : 4 + ctx.count], needs[4 + ctx.count :]
        grad_weights = _weight_gradients(ctx, flat, flat_x, needs_weights)
        grad_biases = [grad.sum(0) if need else None for grad, need in zip(flat, needs_biases, strict=True)]
        if work is not None:
            work.wait()
            grad_x = grad_x.movedim(0, 1).contiguous()
        return grad_x, None, None, None, *grad_weights, *grad_biases


class ColumnLinear(torch.autograd.Function):
    """y_i = x W_i^T + b_i for several i; includes `f`: the gradient of x is all-reduced over the axis."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, layer: Any, count: int, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Compute the outputs of all layers, each [batch, seq, out]."""
        weights, biases = tensors[:count], tensors[count:]
        ctx.group, ctx.count = group, count
        ctx.save_for_backward(x, *weights)
        ctx.weights = weights
        ctx.backend, ctx.store = layer.kernel, layer.weight_grad_store
        return tuple(ctx.backend.forward(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Sum the input gradients of all layers, and start their reduction before the weight gradients are computed."""
        x, *weights = ctx.saved_tensors
        flat = [matrix(grad) for grad in grads]  # [tokens, local out]
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.backend.grad_input(flat[0], weights[0])
            for grad, weight in zip(flat[1:], weights[1:], strict=True):
                ctx.backend.add_grad_input(grad_x, grad, weight)
            work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        # Compute the weight gradients while the all-reduce runs.
        needs = ctx.needs_input_grad[4:]
        flat_x = matrix(x)  # [tokens, in]
        grad_weights = _weight_gradients(ctx, flat, flat_x, needs[: ctx.count])
        grad_biases = [grad.sum(0) if need else None for grad, need in zip(flat, needs[ctx.count :], strict=True)]
        if work is not None:
            work.wait()
            grad_x = grad_x.view_as(x)
        return grad_x, None, None, None, *grad_weights, *grad_biases


class RowLinear(torch.autograd.Function):
    """y = g(x W^T), or g-bar*: the sum over ranks is a part of the product, whose own result is never saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dim: int | None, group: ProcessGroup, layer: Any) -> Tensor:
        """Compute [..., local in] -> [..., out]; `dim` is the one that ranks have a part of, or None."""
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.dim, ctx.group = weight, dim, group
        ctx.backend, ctx.store = layer.kernel, layer.weight_grad_store

        def product() -> Tensor:
            out = ctx.backend.forward(x, weight)
            if dim is not None:
                return reduce_scatter_dim(out, dim, group)
            dist.all_reduce(out, group=group)
            return out

        return computed_once(product)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute both gradients from the gradient of all tokens."""
        (x, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
        flat = matrix(grad if ctx.dim is None else all_gather_dim(grad, ctx.dim, ctx.group, x.shape[ctx.dim]))
        used = weight if ctx.backend.is_native else ctx.weight  # see `_Linear`
        grad_x = ctx.backend.grad_input(flat, used).view_as(x) if needs[0] else None
        grad_weight = weight_gradient(ctx.weight, flat, matrix(x), ctx.backend, ctx.store) if needs[1] else None
        return grad_x, grad_weight, None, None, None


def _weight_gradients(
    ctx: Any, flat_grads: Sequence[Tensor], flat_x: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    return [
        weight_gradient(weight, grad, flat_x, ctx.backend, ctx.store) if need else None
        for weight, grad, need in zip(ctx.weights, flat_grads, needs, strict=True)
    ]
