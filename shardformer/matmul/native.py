"""Native products, whose autograd nodes overlap communication; and `MatmulLayer`, the base of layers with a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.matmul.kernel import LinearKernel, Products
from shardformer.matmul.linear_autograd import ColumnLinear, GatheredLinear, RowLinear
from shardformer.matmul.weight_grad import WeightGradStore, autocast, linear
from shardformer.sequence_parallel.split_gather import SEQ_DIM, PendingGather
from shardformer.shard_spec import ShardSpec, shard_parameter
from shardformer.utils.untraced import saved_results


class Native(Products, LinearKernel):
    """Weights of `nn.Linear` and `Conv1D`, multiplied by torch; layers that read one input share an autograd node."""

    def accepts(self, native: nn.Module, group: ProcessGroup) -> bool:
        """Return True."""
        return True

    def shape(self, native: nn.Module) -> tuple[int, int]:
        """Return (out, in).

        Raises:
            TypeError: `native` is not a linear layer.
        """
        first, second = native.weight.shape[:: -1 if is_transposed(native) else 1]
        return first, second

    def cut(self, native: nn.Module, features: ShardSpec, dim: int) -> nn.Parameter:
        """Return this rank's shard, in the native layout."""
        dim = 1 - dim if is_transposed(native) else dim
        return shard_parameter(native.weight, replace(features, full_shape=tuple(native.weight.shape), dim=dim))

    def multiply(self, layer: MatmulLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + b."""
        return layer.linear(x, layer.matrix, bias)

    def columns(self, layers: Sequence[Any], x: Tensor) -> Sequence[Tensor]:
        """Compute [..., in] -> [..., local out] for column-parallel layers that all read `x`."""
        first, count = layers[0], len(layers)
        weights = [layer.matrix for layer in layers]
        biases = [layer.added_bias for layer in layers]
        pending = PendingGather.of(x)
        if pending is not None:
            return GatheredLinear.apply(pending.local, pending, first, count, *autocast(*weights, *biases))
        if first.input_is_gathered:
            return [first.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        x, *parameters = autocast(x, *weights, *biases)
        return ColumnLinear.apply(x, first.group, first, count, *parameters)

    def rows(self, layer: Any, x: Tensor) -> Tensor:
        """Compute the sum over ranks of x W^T, in one node where the layer is recomputed by operators."""
        if torch.compiler.is_compiling() or saved_results.get() is None:
            return super().rows(layer, x)
        x, weight = autocast(layer.own_features(x), layer.matrix)
        if layer.sequence is None:
            return RowLinear.apply(x, weight, None, layer.group, layer)
        if x.dim() > 2:
            return RowLinear.apply(x, weight, SEQ_DIM, layer.group, layer)
        by_rows = x.unflatten(0, (-1, layer.sequence.length))
        return RowLinear.apply(by_rows, weight, SEQ_DIM, layer.group, layer).flatten(0, 1)


NATIVE = Native()


class MatmulLayer:
    """Base of the layers that compute x W^T + b by a kernel; a mixin of modules.

    Attributes:
        kernel: keeps the weight and computes the products.
        weight_grad_store: defers the weight gradients of split backward passes; None if no pass is split.
    """

    kernel: LinearKernel = NATIVE
    weight_grad_store: WeightGradStore | None = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute x W^T + b by the three products of a kernel that has them: [..., in] -> [..., out]."""
        return linear(x, weight, bias, self.kernel, self.weight_grad_store)


def is_linear(module: nn.Module) -> bool:
    """Return whether the layers of this package can replace `module`."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def is_transposed(module: nn.Module) -> bool:
    """Return whether the weight is stored [in, out].

    Raises:
        TypeError: the module is neither `nn.Linear` nor `Conv1D`.
    """
    if is_linear(module):
        return not isinstance(module, nn.Linear)
    raise TypeError(f"{type(module).__name__} is not a linear layer; name an nn.Linear or a Conv1D in the policy")
