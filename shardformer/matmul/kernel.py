"""LinearKernel: how a linear layer keeps its weight, cuts it over ranks, and multiplies by it.

Each linear layer has a kernel (`MatmulLayer.kernel`); `KERNELS` in `layers/linear.py` lists those that a native layer
calls for, and the option `precision="fp8"` replaces the native one. A kernel says where a weight may be cut and makes
the shard; the column- and row-parallel layers bring the collectives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.shard_spec import ShardSpec


class LinearKernel(ABC):
    """One way to compute y = x W^T + b with a shard of a weight."""

    @abstractmethod
    def accepts(self, native: nn.Module, group: ProcessGroup) -> bool:
        """Return whether shards of this native layer on `group` have this kernel."""

    @abstractmethod
    def shape(self, native: nn.Module) -> tuple[int, int]:
        """Return (out, in) of the weight of a layer."""

    def cuts_inputs(self, native: nn.Module, features: ShardSpec) -> bool:
        """Return whether the weight can be cut between inputs such that partial products sum up to the whole product.

        Args:
            native: the native layer.
            features: sharding of its inputs, of one dim.
        """
        return True

    @abstractmethod
    def cut(self, native: nn.Module, features: ShardSpec, dim: int) -> nn.Parameter:
        """Return this rank's shard of a layer's weight, with its `ShardSpec`.

        Args:
            native: the native layer, which stays as it is.
            features: sharding of the outputs (`dim` 0) or of the inputs (`dim` 1), of one dim.
        """

    def prepare(self, layer: Any, native: nn.Module) -> None:  # noqa: B027 (most kernels need nothing more)
        """Give a sharded layer, which has its weight already, what `multiply` needs besides."""

    @abstractmethod
    def multiply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + b: [..., local in] -> [..., local out], without communication."""

    def columns(self, layers: Sequence[Any], x: Tensor) -> Sequence[Tensor]:
        """Compute [..., in] -> [..., local out] for column-parallel layers, with any kernels, that all read `x`."""
        x = layers[0].copied(x)
        return [layer.kernel.multiply(layer, x, layer.added_bias) for layer in layers]

    def rows(self, layer: Any, x: Tensor) -> Tensor:
        """Compute the sum over ranks of x W^T for a row-parallel layer."""
        return layer.summed(self.multiply(layer, layer.own_features(x), None))


class Products:
    """The three products of y = x W^T + b in native torch, for autograd nodes; weights are [out, in].

    Attributes:
        is_native: whether autograd's own products are the same.
        writes_gradients: whether it has `write_grad_weight`.
    """

    is_native = True
    writes_gradients = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute [..., in] -> [..., out]."""
        out = F.linear(x, weight, bias)
        return no_view(out) if out._is_view() else out

    def grad_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Compute the input gradient, [tokens, in], from the output gradient, [tokens, out]."""
        return grad @ weight

    def add_grad_input(self, total: Tensor, grad: Tensor, weight: Tensor) -> None:
        """Add the input gradient to `total`."""
        total.addmm_(grad, weight)

    def grad_weight(self, grad: Tensor, x: Tensor, transposed: bool = False) -> Tensor:
        """Compute the gradient of W, [out, in], or of its transpose, from output gradient [tokens, out] and input."""
        return x.t() @ grad if transposed else grad.t() @ x

    def write_grad_weight(self, place: Tensor, adds: bool, grad: Tensor, x: Tensor, transposed: bool = False) -> None:
        """Write the gradient of W, or of its transpose, to `place`, or add it to the contents of `place`."""
        first, second = (x.t(), grad) if transposed else (grad.t(), x)
        place.addmm_(first, second, beta=int(adds))


def no_view(x: Tensor) -> Tensor:
    """Return `x`, in the same memory, as a tensor that is not a view: allows in-place operators on a node's output."""
    return torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x
