"""Slot policies: static methods that list the weights of a model family by path, one method per slot.

The interface follows ColossalAI's first ShardFormer (`argument_policy`, `attn_in`, `Col_Layer`, ...). The slots
stand for a plan of styles, as that of a family; the sharding engine does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Layer:
    """One layer of a slot. A plain `Layer`, neither column nor row, is replicated on every rank.

    Attributes:
        weight, bias: paths relative to the module of the slot, such as "attention.self.query.weight".
        replace_layer: the class that replaces the layer; None for this package's class of that kind.
        ignore: whether the layer may be missing.
        n_cast: number of fused projections in the weight, each sharded independently (3 for query, key and value).
    """

    weight: str | None = None
    bias: str | None = None
    replace_layer: type[nn.Module] | None = None
    ignore: bool = False
    n_cast: int | None = None

    @property
    def path(self) -> str:
        """Path of the layer.

        Raises:
            ValueError: neither a weight nor a bias is given, or they belong to two modules.
        """
        paths = {each.rpartition(".")[0] for each in (self.weight, self.bias) if each}
        if len(paths) != 1 or "" in paths:
            raise ValueError(
                f"{type(self).__name__}(weight={self.weight!r}, bias={self.bias!r}) names no layer; "
                "use weight='path.of.the.layer.weight'"
            )
        return paths.pop()


@dataclass(frozen=True)
class Col_Layer(Layer):  # noqa: N801 (the name of the interface)
    """A layer whose output features (or rows, for an embedding) are sharded.

    Attributes:
        gather_output: whether the output is gathered immediately.
    """

    gather_output: bool = False


@dataclass(frozen=True)
class Row_Layer(Layer):  # noqa: N801
    """A layer whose input features are sharded and whose outputs are summed over ranks."""


@dataclass(frozen=True)
class Argument:
    """The changes to modules of one class.

    Attributes:
        attr_dict: path of an attribute, relative to the module -> its value on each rank.
        param_funcs: the slots, functions without arguments that return layers.
    """

    attr_dict: Mapping[str, Any] = field(default_factory=dict)
    param_funcs: Sequence[Callable[[], Sequence[Layer]]] = ()


class SlotPolicy:
    """Interface of slot policies. All methods are static; only `argument_policy` is required."""

    @staticmethod
    def argument_policy(model_config: Any, shard_config: int) -> Mapping[type[nn.Module], Argument]:
        """Return the changes to each module class.

        Args:
            model_config: configuration of the model.
            shard_config: number of tensor-parallel ranks.
        """
        raise NotImplementedError

    @staticmethod
    def inject_policy() -> tuple[type[nn.Module], type[nn.Module]] | tuple[()]:
        """Return a module class and the class that its instances are changed to; () for none."""
        return ()

    @staticmethod
    def binding_policy() -> Mapping[str, str] | None:
        """Return the parameters to tie: name of a parameter -> name of the one that is replaced by it."""
        return None

    @staticmethod
    def attn_in() -> Sequence[Layer]:
        """Return the query, key and value projections."""
        raise NotImplementedError

    @staticmethod
    def attn_out() -> Sequence[Layer]:
        """Return the output projection of attention."""
        raise NotImplementedError

    @staticmethod
    def mlp_in() -> Sequence[Layer]:
        """Return the projection h -> 4h."""
        raise NotImplementedError

    @staticmethod
    def mlp_out() -> Sequence[Layer]:
        """Return the projection 4h -> h."""
        raise NotImplementedError

    @staticmethod
    def embedding() -> Sequence[Layer]:
        """Return the embeddings that are sharded over the vocabulary."""
        raise NotImplementedError

    @staticmethod
    def unembedding() -> Sequence[Layer]:
        """Return the heads that are sharded over the vocabulary."""
        raise NotImplementedError
