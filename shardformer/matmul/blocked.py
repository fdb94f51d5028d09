"""Products in blocks: x W^T + b of a rank's shard of a weight, one product for each block of its features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardformer.distributed.blocks import BlockedTensor, Blocks, block_to_read, blocks_of, write_block
from shardformer.matmul.kernel import LinearKernel
from shardformer.matmul.native import Native
from shardformer.matmul.weight_grad import autocast, matrix
from shardformer.shard_spec import ShardSpec


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
    """The blocks of a linear layer's weight.

    Attributes:
        slices: of each local block, along the sharded features of this rank's weight.
        dim: the sharded dim of the weight as [out, in].
        uses: for each local block, how many blocks before it read the same slices (key/value heads fewer than blocks).
        transposed: the weight is stored [in, out].
    """

    slices: Sequence[Sequence[slice]]
    dim: int
    uses: Sequence[int]
    transposed: bool

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
    """Compute x W^T + b in each block: [..., in] -> [..., out].

    Args:
        weight: this rank's shard.
        bias: this rank's shard of it; None if the input features are sharded, or there is none.
    """
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
