"""QuantisedWeight: what the sharded layers ask of a kind of quantised weight."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from shardformer.distributed.collectives import copy_to_region, gather_features, split_to_region
from shardformer.matmul.kernel import LinearKernel


class QuantisedWeight(LinearKernel):
    """One kind of frozen quantised weight of a linear layer, multiplied by its library's product.

    A row-parallel layer is cut between inputs if partial products sum up to the whole product, which blocks that
    straddle ranks and inputs that are rounded by the values of all features rule out. Otherwise it is cut between
    outputs: the input features are gathered before the product and the output features after it.

    Attributes:
        name: the kind, as its library calls it.
    """

    name: str

    @abstractmethod
    def unusable(self, module: nn.Module) -> str | None:
        """Return what the layer has that no layout can train on, and what would do instead; None if it can."""

    @abstractmethod
    def problem(self, module: nn.Module) -> str | None:
        """Return what the layer has that cannot be cut, and what would do instead; None if rows can be cut."""

    def packed(self, module: nn.Module) -> Sequence[Tensor]:
        """Return what has the values of a layer's weight, each in memory of its own: its packed values, and scales."""
        return [module.weight]

    def follow(self, module: nn.Module) -> None:  # noqa: B027 (most layers have no views)
        """Follow the tensors of `packed` of a layer to other memory, where the layer has views of them."""

    def prepare(self, layer: Any, native: nn.Module) -> None:
        """Tell peft whether `merge` into the shard gives the shard of the merged whole."""
        is_cut_alike = getattr(layer, "outputs", None) is None
        layer.merges_exactly = is_cut_alike and self.merges_exactly(layer, native)

    def rows(self, layer: Any, x: Tensor) -> Tensor:
        """Compute the sum over ranks of x W^T, or put the outputs of ranks together."""
        if layer.outputs is None:
            return super().rows(layer, x)
        whole = x if layer.splits_input else gather_features(x, layer.features, layer.group)
        # Each rank multiplies the gradient by its own rows: their sum is the gradient of the whole input.
        out = self.multiply(layer, copy_to_region(whole, layer.group), None)
        out = gather_features(out, layer.outputs, layer.group)
        return out if layer.sequence is None else split_to_region(out, out.dim() - 2, layer.group)

    @abstractmethod
    def merges_exactly(self, layer: nn.Module, native: nn.Module) -> bool:
        """Return whether quantising a shard again, as peft's `merge` does, gives the shard of the whole."""


def is_layer_of(module: nn.Module, name: str) -> bool:
    """Return whether a module is a layer of bitsandbytes, by the name of its class."""
    library = sys.modules.get("bitsandbytes.nn.modules")
    return library is not None and isinstance(module, getattr(library, name))
