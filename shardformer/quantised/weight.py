"""QuantisedWeight: what the sharded layers ask of a kind of quantised weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from shardformer.shard_spec import ShardSpec


class QuantisedWeight(ABC):
    """One kind of quantised weight of a linear layer.

    Attributes:
        name: the kind, as its library calls it.
    """

    name: str

    @abstractmethod
    def shape(self, module: nn.Module) -> tuple[int, int]:
        """Return (out, in) of the weight of a layer."""

    @abstractmethod
    def unusable(self, module: nn.Module) -> str | None:
        """Return what the layer has that no layout can train on, and what would do instead; None if it can."""

    @abstractmethod
    def problem(self, module: nn.Module) -> str | None:
        """Return what the layer has that cannot be cut, and what would do instead; None if rows can be cut."""

    @abstractmethod
    def cuts_inputs(self, module: nn.Module, features: ShardSpec) -> bool:
        """Return whether the weight can be cut between inputs such that partial products sum up to the whole product.

        Args:
            module: the native layer.
            features: sharding of its inputs, of one dim.
        """

    @abstractmethod
    def cut(self, module: nn.Module, features: ShardSpec, dim: int) -> nn.Parameter:
        """Return this rank's shard of a layer's weight, with its `ShardSpec`.

        Args:
            module: the native layer, which stays as it is.
            features: sharding of the outputs (`dim` 0) or of the inputs (`dim` 1), of one dim.
        """

    def packed(self, module: nn.Module) -> Sequence[Tensor]:
        """Return what has the values of a layer's weight, each in memory of its own: its packed values, and scales."""
        return [module.weight]

    def follow(self, module: nn.Module) -> None:  # noqa: B027 (most layers have no views)
        """Follow the tensors of `packed` of a layer to other memory, where the layer has views of them."""

    @abstractmethod
    def prepare(self, layer: nn.Module, native: nn.Module) -> None:
        """Give a sharded layer, which has its weight already, what `multiply` and peft need of the native layer."""

    @abstractmethod
    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + b by the library's product: [..., local in] -> [..., local out]."""

    @abstractmethod
    def merges_exactly(self, layer: nn.Module, native: nn.Module) -> bool:
        """Return whether quantising a shard again, as peft's `merge` does, gives the shard of the whole."""
