"""Slot policies: static methods that list the weights of a model family by path, one method per slot.

The interface follows ColossalAI's first ShardFormer (`argument_policy`, `attn_in`, `Col_Layer`, ...). The slots are
converted to the table of a policy; the sharding engine does the rest.
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
from shardformer.policies.base import ModulePolicyDescription, Origin, SubModuleReplacementDescription
from shardformer.policies.user.base import UserPolicy
from shardformer.utils.derived_modules import replace_modules, with_class
from shardformer.utils.module_paths import has_module


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


class SlotPolicyAdapter(UserPolicy):
    """Policy built from a slot policy class.

    Args:
        slots: the class with the static methods.
    """

    origin = Origin.SLOTS

    def __init__(self, slots: type) -> None:
        super().__init__()
        self.slots = slots

    def check(self) -> list[str]:
        """Return why the model cannot be sharded; the slots must name classes and parameters of it."""
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
        """Tie the parameters of `binding_policy`."""
        for name, other in self._bindings().items() if not self._unknown_names() else ():
            owner, _, attribute = other.rpartition(".")
            setattr(self.model.get_submodule(owner), attribute, self.model.get_parameter(name))
        return super().preprocess()

    def module_policy(self) -> Mapping[str | type[nn.Module], ModulePolicyDescription]:
        """Return the table that the slots are converted to."""
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
        """Change the classes of the modules that `inject_policy` names."""
        injected = getattr(self.slots, "inject_policy", tuple)() or ()
        pairs = injected.items() if isinstance(injected, Mapping) else [injected] if injected else []
        for native, new in pairs:
            found = [module for module in self.model.modules() if type(module) is native]
            replace_modules(self.model, {module: with_class(module, new) for module in found})
        return super().postprocess()

    def _arguments(self) -> Mapping[type[nn.Module], Argument]:
        return self.slots.argument_policy(self.model.config, max(self.shard_config.tensor_parallel_size, 1))

    def _unknown_names(self) -> list[str]:
        known = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return [name for pair in self._bindings().items() for name in pair if name not in known]

    def _bindings(self) -> Mapping[str, str]:
        found = getattr(self.slots, "binding_policy", dict)()
        return found if isinstance(found, Mapping) else {}  # the original default is NotImplementedError

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
