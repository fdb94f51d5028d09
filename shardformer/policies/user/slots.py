"""Slot policies: a family described by static methods that name weights by their paths, slot by slot.

The interface is that of ColossalAI's first ShardFormer (`argument_policy`, `attn_in`, `Col_Layer`, ...). What the slots
say becomes the table of a policy, so that everything else is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardformer.layers import (
    ColumnParallelLinear,
    ParallelModule,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLMHead,
)
from shardformer.layers.linear import out_features
from shardformer.policies.base import ModulePolicyDescription, SubModuleReplacementDescription
from shardformer.policies.user.base import UserPolicy
from shardformer.stages.stage import has_module


@dataclass(frozen=True)
class Layer:
    """One layer of a slot; without a kind it stays whole on every rank.

    Attributes:
        weight, bias: paths below the module that the slot is for, such as "attention.self.query.weight".
        replace_layer: the class that takes its place; None for this package's own of that kind.
        ignore: whether it may be missing.
        n_cast: fused projections in one weight, each of which is cut by itself (3 for query, key and value).
    """

    weight: str | None = None
    bias: str | None = None
    replace_layer: type[nn.Module] | None = None
    ignore: bool = False
    n_cast: int | None = None

    @property
    def path(self) -> str:
        """Of the module.

        Raises:
            ValueError: neither a weight nor a bias is named, or they are those of two modules.
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
    """Its output features, or its rows if it is an embedding, are cut.

    Attributes:
        gather_output: whether outputs are put together at once.
    """

    gather_output: bool = False


@dataclass(frozen=True)
class Row_Layer(Layer):  # noqa: N801
    """Its input features are cut, and its outputs summed."""


@dataclass(frozen=True)
class Argument:
    """What changes in modules of one class.

    Attributes:
        attr_dict: path of an attribute below the module -> its value on a rank.
        param_funcs: the slots, functions without arguments that return layers.
    """

    attr_dict: Mapping[str, Any] = field(default_factory=dict)
    param_funcs: Sequence[Callable[[], Sequence[Layer]]] = ()


class SlotPolicy:
    """What a slot policy may say; each method is static. Only `argument_policy` has to be there."""

    @staticmethod
    def argument_policy(model_config: Any, shard_config: int) -> Mapping[type[nn.Module], Argument]:
        """Class of module -> what changes in it.

        Args:
            model_config: of the model.
            shard_config: the number of tensor-parallel ranks.
        """
        raise NotImplementedError

    @staticmethod
    def inject_policy() -> tuple[type[nn.Module], type[nn.Module]] | tuple[()]:
        """A class, and the one whose forward its modules get; () for none."""
        return ()

    @staticmethod
    def binding_policy() -> Mapping[str, str] | None:
        """Name of a parameter -> name of one that is to be the same."""
        return None

    @staticmethod
    def attn_in() -> Sequence[Layer]:
        """Query, key and value."""
        raise NotImplementedError

    @staticmethod
    def attn_out() -> Sequence[Layer]:
        """The projection behind the heads."""
        raise NotImplementedError

    @staticmethod
    def mlp_in() -> Sequence[Layer]:
        """h -> 4h."""
        raise NotImplementedError

    @staticmethod
    def mlp_out() -> Sequence[Layer]:
        """4h -> h."""
        raise NotImplementedError

    @staticmethod
    def embedding() -> Sequence[Layer]:
        """Tables that are cut over the vocabulary."""
        raise NotImplementedError

    @staticmethod
    def unembedding() -> Sequence[Layer]:
        """Heads that are cut over the vocabulary."""
        raise NotImplementedError


class SlotPolicyAdapter(UserPolicy):
    """The table that a slot policy means for one model.

    Args:
        slots: the class with the static methods.
    """

    def __init__(self, slots: type) -> None:
        super().__init__()
        self.slots = slots

    def check(self) -> list[str]:
        problems = super().check()
        names = {cls.__name__ for module in self.model.modules() for cls in type(module).__mro__}
        for cls in self._arguments():
            if cls.__name__ not in names:
                problems.append(
                    f"{self.slots.__name__}.argument_policy names {cls.__name__}, and {type(self.model).__name__} has "
                    "no such module; use the class of one that it has"
                )
        return problems + [
            f"{self.slots.__name__}.binding_policy names {name}, which {type(self.model).__name__} does not have; "
            "use names of its parameters"
            for name in self._unknown_names()
        ]

    def preprocess(self) -> nn.Module:
        for name, other in self._bindings().items() if not self._unknown_names() else ():
            owner, _, attribute = other.rpartition(".")
            setattr(self.model.get_submodule(owner), attribute, self.model.get_parameter(name))
        return super().preprocess()

    def module_policy(self) -> Mapping[str | type[nn.Module], ModulePolicyDescription]:
        table: dict[str | type[nn.Module], ModulePolicyDescription] = {}
        for cls, argument in self._arguments().items():
            description = table[cls] = ModulePolicyDescription()
            if argument.attr_dict and self.shard_config.tensor_parallel_size > 1:
                description.param_replacement.append(_setter(argument.attr_dict))
            for slot in argument.param_funcs:
                for layer in slot():
                    description.sub_module_replacement.append(self._replacement(cls, slot.__name__, layer))
        return table

    def postprocess(self) -> nn.Module:
        injected = getattr(self.slots, "inject_policy", tuple)() or ()
        pairs = injected.items() if isinstance(injected, Mapping) else [injected] if injected else []
        for native, new in pairs:
            for module in self.model.modules():
                if type(module) is native:
                    module.__class__ = new
        return super().postprocess()

    def _arguments(self) -> Mapping[type[nn.Module], Argument]:
        return self.slots.argument_policy(self.model.config, max(self.shard_config.tensor_parallel_size, 1))

    def _unknown_names(self) -> list[str]:
        known = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return [name for pair in self._bindings().items() for name in pair if name not in known]

    def _bindings(self) -> Mapping[str, str]:
        found = getattr(self.slots, "binding_policy", dict)()
        return found if isinstance(found, Mapping) else {}  # the interface's own default is NotImplementedError

    def _replacement(self, cls: type[nn.Module], slot: str, layer: Layer) -> SubModuleReplacementDescription:
        path, options = layer.path, {"ignore_if_not_exist": layer.ignore}
        natives = [
            module.get_submodule(path)
            for module in self.model.modules()
            if any(each.__name__ == cls.__name__ for each in type(module).__mro__) and has_module(module, path)
        ]
        native = natives[0] if natives else None
        if layer.replace_layer is not None and issubclass(layer.replace_layer, ParallelModule):
            return SubModuleReplacementDescription(path, layer.replace_layer, {}, **options)
        if isinstance(layer, Row_Layer):
            return SubModuleReplacementDescription(path, RowParallelLinear, {}, **options)
        if not isinstance(layer, Col_Layer):
            return SubModuleReplacementDescription(path, None, **options)
        if isinstance(native, nn.Embedding):
            return SubModuleReplacementDescription(
                path, VocabParallelEmbedding, dict(self.shard_config.vocab_options), **options
            )
        if slot == "unembedding":
            return SubModuleReplacementDescription(
                path, VocabParallelLMHead, dict(self.shard_config.vocab_options), **options
            )
        arguments: dict[str, Any] = {"gather_output": layer.gather_output}
        if layer.n_cast and native is not None:
            arguments["part_size"] = out_features(native) // layer.n_cast
        return SubModuleReplacementDescription(path, ColumnParallelLinear, arguments, reads=slot, **options)


def _setter(attributes: Mapping[str, Any]) -> Callable[[nn.Module], None]:
    def set_all(module: nn.Module) -> None:
        for path, value in attributes.items():
            owner, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner), name, value)

    return set_all
