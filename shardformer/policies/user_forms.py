"""What a user writes instead of a policy: slots (static methods that list weights by path), and TPInfo (module names).

The interfaces follow ColossalAI's first ShardFormer (`argument_policy`, `attn_in`, `Col_Layer`, ...) and ATorch's
manual tensor parallelism (`TPInfo`, `shard_col`, `shard_row`, `shard_vocab`, ...). Both stand for a plan of styles, as
that of a family; the sharding engine does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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


# Arguments of a layer that a rule accepts. Harmless arguments that have no effect here are accepted and ignored.
_LAYER_ARGUMENTS = {
    "shard_col": ("stride", "gather_output", "num_heads", "async_grad_allreduce"),
    "shard_row": ("input_is_parallel", "num_heads"),
    "shard_vocab": (),
}
Rule = str | Mapping[str, Mapping[str, Any]]


class TPInfo:
    """Tensor-parallel sharding rules for modules, matched by the end of their names.

    The rule "mlp.c_fc" matches this name and all names that end in ".mlp.c_fc"; `*` matches any number, as in
    "h.*.attn". Methods return the object, so that calls can be chained.

    Example:
        ```python
        TPInfo().shard_col({"attn.c_attn": {"stride": 3}}, "mlp.c_fc").shard_row("attn.c_proj", "mlp.c_proj")
        ```
    """

    def __init__(self) -> None:
        self.rules: dict[str, dict[str, Any]] = {
            kind: {}
            for kind in (*_LAYER_ARGUMENTS, "replic_drop", "parallel_drop", "shrink", "partial_grad", "replicated")
        }

    def __repr__(self) -> str:
        said = (f"{kind}={_in_order(rules)}" for kind, rules in self.rules.items() if rules)
        return f"TPInfo({', '.join(said)})"

    def shard_col(self, *rules: Rule) -> TPInfo:
        """Shard the output features of linear layers.

        Arguments of a layer, {name: {...}}: `stride`, the number of fused projections (3 for a fused query, key and
        value), each sharded independently; `gather_output`; `num_heads`, the number of heads, which are not split.
        """
        return self._add("shard_col", rules)

    def shard_row(self, *rules: Rule) -> TPInfo:
        """Shard the input features of linear layers; outputs are summed over ranks, then the bias is added.

        Arguments of a layer, {name: {...}}: `input_is_parallel=False` if its input is not sharded; `num_heads`.
        """
        return self._add("shard_row", rules)

    def shard_vocab(self, *rules: Rule) -> TPInfo:
        """Shard the rows of embeddings, and the heads that are tied to them."""
        return self._add("shard_vocab", rules)

    def replic_drop(self, *names: str) -> TPInfo:
        """Declare dropouts of replicated activations: all tensor-parallel ranks use the same mask."""
        return self._add("replic_drop", names)

    def parallel_drop(self, *names: str) -> TPInfo:
        """Declare dropouts of sharded activations: each tensor-parallel rank draws its own mask."""
        return self._add("parallel_drop", names)

    def shrink(self, attributes: Mapping[str, str | Iterable[str]]) -> TPInfo:
        """Divide integer attributes of modules by the number of ranks: {name: {attribute, ...}}.

        An empty set declares that the attributes of a module are correct for a rank's share as they are.

        Raises:
            ValueError: `attributes` is not a mapping.
        """
        if not isinstance(attributes, Mapping):
            raise ValueError(f"shrink({attributes!r}) names no attributes; use shrink({{'attn': {{'num_heads'}}}})")
        for name, wanted in attributes.items():
            wanted = {wanted} if isinstance(wanted, str) else set(wanted)
            self.rules["shrink"][name] = self.rules["shrink"].get(name, set()) | wanted
        return self

    def partial_grad(self, *names: str) -> TPInfo:
        """Declare replicated modules that process sharded activations (per-head norms): gradients are summed."""
        return self._add("partial_grad", names)

    def replicated(self, *names: str) -> TPInfo:
        """Declare modules next to sharded layers replicated: every rank computes the same with them."""
        return self._add("replicated", names)

    def is_vocab_parallelled(self) -> bool:
        """Return whether any embedding is sharded."""
        return bool(self.rules["shard_vocab"])

    def _add(self, kind: str, rules: Iterable[Rule]) -> TPInfo:
        for rule in rules:
            takes_arguments = kind in _LAYER_ARGUMENTS
            if not isinstance(rule, str) and not (takes_arguments and isinstance(rule, Mapping)):
                form = "a name or {name: {argument: value}}" if takes_arguments else "a name"
                raise ValueError(f"{kind}({rule!r}) is no rule; use {form}")
            for name, arguments in ({rule: {}} if isinstance(rule, str) else rule).items():
                self.rules[kind][name] = dict(arguments)
                for argument in arguments:
                    if argument not in _LAYER_ARGUMENTS[kind]:
                        known = ", ".join(_LAYER_ARGUMENTS[kind]) or "none"
                        raise ValueError(f"{kind} knows no argument '{argument}' of {name}; use one of: {known}")
        return self


def _in_order(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the rules, so that their text is the same on every rank: sets have no order."""
    return {name: sorted(said) if isinstance(said, set) else said for name, said in sorted(rules.items())}
