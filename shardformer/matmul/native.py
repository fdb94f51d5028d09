"""MatmulLayer, the base of layers with a kernel, and native products, whole or by block of a rank's features.

Their autograd nodes overlap communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardformer.distributed.blocks import BlockedTensor, Blocks, block_to_read, blocks_of, write_block
from shardformer.distributed.collectives import all_gather_dim, reduce_scatter_dim, without_base
from shardformer.distributed.sequence_parallel import SEQ_DIM, PendingGather, PendingTokens, SequenceParallel
from shardformer.matmul.kernel import (
    LinearKernel,
    Products,
    WeightGradStore,
    autocast,
    linear,
    matrix,
    no_view,
    weight_gradient,
)
from shardformer.shard_spec import ShardSpec, shard_parameter
from shardformer.utils.untraced import computed_once, saved_results


class Native(Products, LinearKernel):
    """Weights of `nn.Linear` and `Conv1D`, multiplied by torch; layers that read one input share an autograd node.

    Attributes:
        gathers_rounded: whether ranks round tokens, and their gradients, before they gather them along a sequence.
    """

    gathers_rounded = False

    def accepts(self, native: nn.Module, group: ProcessGroup) -> bool:
        """Return True."""
        return True

    def shape(self, native: nn.Module) -> tuple[int, int]:
        """Return (out, in); raises TypeError if `native` is not a linear layer."""
        first, second = native.weight.shape[:: -1 if is_transposed(native) else 1]
        return first, second

    def cut(self, native: nn.Module, features: ShardSpec, dim: int) -> nn.Parameter:
        """Return this rank's shard, in the native layout."""
        dim = 1 - dim if is_transposed(native) else dim
        return shard_parameter(native.weight, replace(features, full_shape=tuple(native.weight.shape), dim=dim))

    def multiply(self, layer: MatmulLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + b."""
        return linear(x, layer.matrix, bias, layer.kernel, layer.weight_grad_store)

    def columns(self, layers: Sequence[Any], x: Tensor) -> Sequence[Tensor]:
        """Compute [..., in] -> [..., local out] for column-parallel layers that all read `x`."""
        if torch.compiler.is_compiling():
            return super().columns(layers, x)
        first, count = layers[0], len(layers)
        weights, biases = [], []
        for layer in layers:
            weights.append(layer.matrix)
            biases.append(layer.bias if layer.adds_bias else None)
        pending = getattr(x, "pending_gather", None)
        if isinstance(pending, PendingGather):
            return GatheredLinear.apply(pending.local, pending, first, count, *autocast(*weights, *biases))
        if first.input_is_gathered:
            kernel, store = first.kernel, first.weight_grad_store
            return [linear(x, weight, bias, kernel, store) for weight, bias in zip(weights, biases, strict=True)]
        x, *parameters = autocast(x, *weights, *biases)
        return ColumnLinear.apply(x, first.group, first, count, *parameters)

    def rows(self, layer: Any, x: Tensor) -> Tensor:
        """Compute the sum over ranks of x W^T; it is of the same node where a gradient is gathered, or if saved."""
        is_one = saved_results.get() is not None or (self.gathers_rounded and layer.sequence is not None)
        if torch.compiler.is_compiling() or not is_one:
            return layer.summed(self.multiply(layer, layer.own_features(x), None))
        x, weight = autocast(layer.own_features(x), layer.matrix)
        if layer.sequence is None:
            return RowLinear.apply(x, weight, None, layer.group, layer)
        if x.dim() > 2:
            return RowLinear.apply(x, weight, SEQ_DIM, layer.group, layer)
        by_rows = x.unflatten(0, (-1, layer.sequence.length))
        return RowLinear.apply(by_rows, weight, SEQ_DIM, layer.group, layer).flatten(0, 1)

    def gathered_gradient(self, grad: Tensor, weight: Tensor, group: ProcessGroup, length: int) -> Any:
        """Gather [batch, seq/tp, out] for the products with `weight`: [batch * seq, out], without padding."""
        return matrix(all_gather_dim(grad, SEQ_DIM, group, length))


NATIVE = Native()


class MatmulLayer:
    """Base of the layers that compute x W^T + b by a kernel; a mixin of modules."""

    kernel: LinearKernel = NATIVE  # keeps the weight and computes the products
    # defers the weight gradients of split backward passes; None if no pass is split
    weight_grad_store: WeightGradStore | None = None


def is_linear(module: nn.Module) -> bool:
    """Return whether the layers of this package can replace `module`."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def is_transposed(module: nn.Module) -> bool:
    """Return whether the weight is stored [in, out]; TypeError if it is neither `nn.Linear` nor `Conv1D`."""
    if is_linear(module):
        return not isinstance(module, nn.Linear)
    raise TypeError(f"{type(module).__name__} is not a linear layer; name an nn.Linear or a Conv1D in the policy")


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
        ctx.save_for_backward(gathered, *map(ctx.backend.saved, weights))
        ctx.weights = weights  # saved tensors do not record whose transposes they are
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Sum the input gradients of all layers, and start their reduction before the weight gradients are computed."""
        gathered, *saved = ctx.saved_tensors
        weights = saved if ctx.backend.is_native else ctx.weights  # see `_Linear`
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


class RoundedGather:
    """A gather of the sequence for products whose kernel rounds tokens: it gathers rounded ones, and others on demand.

    Either is gathered when it is first read. Gradients of all readers add up before they are reduce-scattered.

    Args:
        local: this rank's tokens, [batch, seq/tp, hidden].
        kernel: that of the column-parallel layers that read the tokens.
    """

    def __init__(self, local: Tensor, region: SequenceParallel, kernel: Any) -> None:
        self.kernel, self.place = kernel, (region.group, region.length)
        self.whole = _Whole.apply(local, *self.place)
        self._local = local.detach()
        self._tokens: dict[bool, Tensor] = {}  # whether they are differentiable -> them
        self._rounded: Any = None

    def placeholder(self) -> Tensor:
        """Return a placeholder [batch, seq, hidden]: column-parallel layers recognize it, others get `tokens`."""
        return PendingTokens.of(self.whole, self)

    def tokens(self) -> Tensor:
        """Return the tokens, [batch, seq, hidden], differentiable."""
        way = torch.is_grad_enabled()
        if way not in self._tokens:
            self._tokens[way] = _Tokens.apply(self.whole, self._local, *self.place)
        return self._tokens[way]

    def rounded(self) -> Any:
        """Return the rounded tokens, [batch * seq, hidden]."""
        if self._rounded is None:
            self._rounded = self.kernel.gathered(self._local, *self.place)
        return self._rounded


class _Whole(torch.autograd.Function):
    """Stands for gathered tokens, [batch, seq, hidden], without values."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: ProcessGroup, length: int) -> Tensor:
        ctx.group = group
        return local.new_empty(()).expand(len(local), length, local.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_dim(grad, SEQ_DIM, ctx.group), None, None


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, local: Tensor, group: ProcessGroup, length: int) -> Tensor:
        return all_gather_dim(local, SEQ_DIM, group, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad, None, None, None


class RoundedLinear(torch.autograd.Function):
    """y = x W^T + b for tokens that are gathered rounded, and saved so."""

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, gather: RoundedGather, weight: Tensor, bias: Tensor | None, layer: Any
    ) -> Tensor:
        """Compute [batch, seq, in] -> [batch, seq, out]."""
        rounded = gather.rounded()
        ctx.backend, ctx.store, ctx.dtype = layer.kernel, layer.weight_grad_store, whole.dtype
        ctx.save_for_backward(rounded.values, rounded.scale)
        ctx.weight, ctx.shape = weight, whole.shape
        out = ctx.backend.forward(rounded, weight, bias)
        return no_view(out.view(*whole.shape[:-1], out.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of tokens, weight and bias."""
        flat, needs = matrix(grad), ctx.needs_input_grad
        grad_x = ctx.backend.grad_input(flat, ctx.weight).view(ctx.shape) if needs[0] else None
        grad_weight = None
        if needs[2]:
            tokens = ctx.backend.restored(*ctx.saved_tensors, ctx.dtype)
            grad_weight = weight_gradient(ctx.weight, flat, tokens, ctx.backend, ctx.store)
        return grad_x, None, grad_weight, flat.sum(0) if needs[3] else None, None


class ColumnLinear(torch.autograd.Function):
    """y_i = x W_i^T + b_i for several i; includes `f`: the gradient of x is all-reduced over the axis."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, layer: Any, count: int, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Compute the outputs of all layers, each [batch, seq, out]."""
        weights, biases = tensors[:count], tensors[count:]
        ctx.group, ctx.count = group, count
        ctx.backend, ctx.store = layer.kernel, layer.weight_grad_store
        ctx.save_for_backward(x, *map(ctx.backend.saved, weights))
        ctx.weights = weights
        outputs = []
        for weight, bias in zip(weights, biases, strict=True):
            outputs.append(layer.kernel.forward(x, weight, bias))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Sum the input gradients of all layers, and start their reduction before the weight gradients are computed."""
        x, *saved = ctx.saved_tensors
        weights = saved if ctx.backend.is_native else ctx.weights  # see `_Linear`
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
        ctx.backend, ctx.store = layer.kernel, layer.weight_grad_store
        ctx.save_for_backward(x, ctx.backend.saved(weight))
        ctx.weight, ctx.dim, ctx.group = weight, dim, group

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
        used = weight if ctx.backend.is_native else ctx.weight  # see `_Linear`
        is_whole = ctx.dim is None
        flat = matrix(grad) if is_whole else ctx.backend.gathered_gradient(grad, used, ctx.group, x.shape[ctx.dim])
        grad_x = ctx.backend.grad_input(flat, used).view_as(x) if needs[0] else None
        grad_weight = weight_gradient(ctx.weight, flat, matrix(x), ctx.backend, ctx.store) if needs[1] else None
        return grad_x, grad_weight, None, None, None


def _weight_gradients(
    ctx: Any, flat_grads: Sequence[Tensor], flat_x: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    found = []
    for weight, grad, need in zip(ctx.weights, flat_grads, needs, strict=True):
        found.append(weight_gradient(weight, grad, flat_x, ctx.backend, ctx.store) if need else None)
    return found


class Blocked(Native):
    """Native weights on an axis that computes in blocks; each layer multiplies by itself."""

    columns, rows = LinearKernel.columns, LinearKernel.rows

    def accepts(self, native: nn.Module, group: ProcessGroup) -> bool:
        """Return whether the axis computes in blocks."""
        return blocks_of(group) is not None

    def prepare(self, layer: Any, native: nn.Module) -> None:
        """Divide the shard."""
        spec = layer.weight.shard_spec
        dim = 1 - spec.dim if layer.transposed else spec.dim
        layer.blocks = BlockedShard.of(blocks_of(layer.group), spec, dim, layer.transposed)

    def multiply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + b, in each block if `x` is in blocks."""
        if isinstance(x, BlockedTensor):
            return blocked_linear(x, layer.weight, bias, layer.blocks)
        return super().multiply(layer, x, bias)


@dataclass(frozen=True)
class BlockedShard:
    """The blocks of a linear layer's weight."""

    slices: Sequence[Sequence[slice]]  # of each local block, along the sharded features of this rank's weight
    dim: int  # the sharded dim of the weight as [out, in]
    # for each local block, how many blocks before it read the same slices (key/value heads fewer than blocks)
    uses: Sequence[int]
    transposed: bool  # the weight is stored [in, out]

    @staticmethod
    def of(blocks: Blocks, spec: ShardSpec, dim: int, transposed: bool) -> BlockedShard:
        """Divide a shard with this spec."""
        slices = blocks.slices(spec)
        uses = [slices[:index].count(each) for index, each in enumerate(slices)]
        return BlockedShard(slices, dim, uses, transposed)

    def as_matrix(self, weight: Tensor) -> Tensor:
        """View a weight, or its gradient, as [out, in]."""
        return weight.t() if self.transposed else weight


def blocked_linear(x: BlockedTensor, weight: Tensor, bias: Tensor | None, shard: BlockedShard) -> BlockedTensor:
    """Compute x W^T + b in blocks: [..., in] -> [..., out]; `bias`: None if inputs are sharded, or without."""
    num_uses, region = max(shard.uses) + 1, x.region
    weight, bias, *inputs = autocast(weight, bias, *x.blocks)
    if num_uses == 1:
        parameters = [weight, bias]
    else:  # the gradients of blocks that overlap are summands of their own
        parameters = [region.use(weight) for _ in range(num_uses)]
        parameters += [None if bias is None else region.use(bias) for _ in range(num_uses)]
    return BlockedTensor(_BlockedLinear.apply(shard, num_uses, *parameters, *inputs), region)


class _BlockedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: BlockedShard, num_uses: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        weight, bias, inputs = tensors[0], tensors[num_uses], tensors[2 * num_uses :]
        ctx.shard, ctx.num_uses, ctx.has_bias = shard, num_uses, bias is not None
        ctx.save_for_backward(weight, *inputs)
        outputs = []
        for slices, x in zip(shard.slices, inputs, strict=True):
            own_bias = None if bias is None else block_to_read(bias, 0, slices)
            outputs.append(F.linear(x, block_to_read(shard.as_matrix(weight), shard.dim, slices), own_bias))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weight, *inputs), shard, count = ctx.saved_tensors, ctx.shard, ctx.num_uses
        needs = ctx.needs_input_grad[2:]
        whole = torch.empty_like if count == 1 else torch.zeros_like  # the blocks of a single use are the whole shard
        found = [whole(weight) if needs[use] else None for use in range(count)]
        rows = weight.shape[1] if shard.transposed else weight.shape[0]
        biases = [weight.new_zeros(rows) if needs[count + use] else None for use in range(count)]
        grads_of_inputs: list[Tensor | None] = []
        for use, slices, x, grad, wants in zip(
            shard.uses, shard.slices, inputs, grads, needs[2 * count :], strict=True
        ):
            flat = matrix(grad)  # [tokens, out of the block]
            if found[use] is not None:
                write_block(shard.as_matrix(found[use]), shard.dim, slices, flat.t() @ matrix(x))
            if biases[use] is not None:
                write_block(biases[use], 0, slices, flat.sum(0))
            own = block_to_read(shard.as_matrix(weight), shard.dim, slices) if wants else None
            grads_of_inputs.append(None if own is None else (flat @ own).view_as(x))
        return None, None, *found, *biases, *grads_of_inputs
