"""TPInfo: tensor parallelism described by module names, for any model, without a policy file.

The interface follows ATorch's manual tensor parallelism (`TPInfo`, `shard_col`, `shard_row`, `shard_vocab`, ...).
The rules are converted to the table of a policy; the sharding engine does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from torch import nn

from shardformer.attention import log_once
from shardformer.layers import (
    ColumnParallelLinear,
    ParallelDropout,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLMHead,
)
from shardformer.layers.linear import out_features
from shardformer.matmul.native import is_linear
from shardformer.policies.base import ModulePolicyDescription, Origin, SubModuleReplacementDescription
from shardformer.policies.feature_counts import whole_counts
from shardformer.policies.user.base import UserPolicy
from shardformer.utils.module_paths import ends_in, nearest_names

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


class TPInfoPolicy(UserPolicy):
    """Policy built from a `TPInfo`.

    Args:
        tp_info: the rules.
    """

    origin = Origin.TP_INFO

    def __init__(self, tp_info: TPInfo) -> None:
        super().__init__()
        self.tp_info = tp_info

    def set_model(self, model: nn.Module) -> None:
        """Set the model; forget the matches in the previous one."""
        super().set_model(model)
        for name in ("_matches", "_tied_heads"):
            self.__dict__.pop(name, None)

    def head_counts(self) -> Mapping[str, int]:
        """Return the head counts of the configuration if there are column-parallel layers; else none."""
        names = ("num_attention_heads", "num_key_value_heads") if self.tp_info.rules["shard_col"] else ()
        config = getattr(self.model, "config", None)
        found = {name: getattr(config, name, None) for name in names}
        return {name: count for name, count in found.items() if isinstance(count, int)}

    def check(self) -> list[str]:
        """Return why the model cannot be sharded; the rules must match it and leave no region open."""
        problems = super().check() + self._unmatched()
        if self.shard_config.tensor_parallel_size > 1 and not problems:
            problems = [*self._wrong_kinds(), *self._uneven(), *self._open_columns(), *self._in_between()]
            problems = problems or self._whole_counts()
        return problems

    def module_policy(self) -> Mapping[str | type[nn.Module], ModulePolicyDescription]:
        """Return the table that the rules are converted to, by paths of the model."""
        table: dict[str, ModulePolicyDescription] = {"": ModulePolicyDescription()}
        replace = table[""].sub_module_replacement.append
        for kind, make in _REPLACEMENTS.items():
            for path, arguments in self._matches[kind].items():
                target, options = make(self.model.get_submodule(path), arguments)
                if path in self._tied_heads:
                    continue
                if target is VocabParallelEmbedding:
                    options = self.shard_config.vocab_options
                replace(SubModuleReplacementDescription(path, target, options))
        for path in self._tied_heads:
            replace(SubModuleReplacementDescription(path, VocabParallelLMHead, dict(self.shard_config.vocab_options)))
        for path in self._matches["partial_grad"]:
            replace(SubModuleReplacementDescription(path, None, partial_gradient=True))
        for path, attributes in self._matches["shrink"].items():
            self._shrink(table.setdefault(path, ModulePolicyDescription()), path, attributes)
        return table

    def _shrink(self, description: ModulePolicyDescription, path: str, attributes: Iterable[str]) -> None:
        module = self.model.get_submodule(path)
        for name in sorted(attributes):
            if hasattr(module, name):
                value = getattr(module, name) // self.shard_config.tensor_parallel_size
                description.attribute_replacement[name] = value
            else:
                log_once(
                    f"{type(module).__name__}.{name}", "is to shrink and does not exist; shapes follow from weights"
                )

    @cached_property
    def _matches(self) -> dict[str, dict[str, Any]]:
        """The rules that match: kind -> path of the module -> arguments of the rule."""
        paths = [path for path, _ in self.model.named_modules()]
        return {
            kind: {path: said for name, said in rules.items() for path in paths if ends_in(path, name)}
            for kind, rules in self.tp_info.rules.items()
        }

    @cached_property
    def _tied_heads(self) -> list[str]:
        """Paths of linear layers tied to a sharded embedding, and of the model's output head if it is sharded."""
        cut = {id(self.model.get_submodule(path).weight) for path in self._matches["shard_vocab"]}
        output = self.model.get_output_embeddings() if hasattr(self.model, "get_output_embeddings") else None
        columns = self._matches["shard_col"]
        return [
            path
            for path, module in self.model.named_modules()
            if isinstance(module, nn.Linear)
            and (id(module.weight) in cut or (module is output and path in columns and not columns[path]))
        ]

    # ----- checks -----

    def _unmatched(self) -> list[str]:
        paths = [path for path, _ in self.model.named_modules() if path]
        problems = []
        for kind, rules in self.tp_info.rules.items():
            for name in rules:
                if not any(ends_in(path, name) for path in paths):
                    near = nearest_names(name, paths)
                    problems.append(
                        f"{kind}('{name}') matches no module of {type(self.model).__name__}; use one of {near}"
                    )
        return problems

    def _wrong_kinds(self) -> list[str]:
        problems = []
        for kind, (accepts, words) in _KINDS.items():
            for path in self._matches[kind]:
                module = self.model.get_submodule(path)
                if not accepts(module):
                    problems.append(f"{kind}: {path} is a {type(module).__name__}; name {words}")
        twice = [path for path in self._matches["shard_col"] if path in self._matches["shard_row"]]
        return problems + [f"{path} is to be cut by shard_col and by shard_row; name it once" for path in twice]

    def _uneven(self) -> list[str]:
        size, problems = self.shard_config.tensor_parallel_size, []
        for path, arguments in self._matches["shard_col"].items():
            module, stride = self.model.get_submodule(path), arguments.get("stride", 1)
            features = out_features(module)
            if not isinstance(stride, int) or stride < 1 or features % stride:
                problems.append(
                    f"stride={stride!r} does not divide the {features} output features of {path}; use 1 or 3"
                )
        for path, attributes in self._matches["shrink"].items():
            for name in sorted(attributes):
                value = getattr(self.model.get_submodule(path), name, 0)
                if not isinstance(value, int) or value % size:
                    problems.append(
                        f"tp_size={size} does not divide {path}.{name}={value!r}, which is to shrink; use one that does"
                    )
        return problems

    def _open_columns(self) -> list[str]:
        """Return problems of layers whose outputs stay sharded although no row-parallel layer reads them."""
        closed = {_block(self.model, path) for path in self._matches["shard_row"]}
        left = {
            path: _block(self.model, path)
            for path, arguments in self._matches["shard_col"].items()
            if not arguments.get("gather_output") and path not in self._tied_heads
        }
        return [
            f"shard_col leaves the outputs of {path} cut, and no layer in {block or 'the model'} is cut by "
            f"shard_row; add one, or use shard_col({{'{path}': {{'gather_output': True}}}})"
            for path, block in left.items()
            if block not in closed
        ]

    def _in_between(self) -> list[str]:
        """Return problems of modules next to column-parallel layers whose input may be sharded or replicated."""
        parents = {path.rpartition(".")[0] for path in self._matches["shard_col"]} - {""}
        said = {path for kind, found in self._matches.items() if kind != "shrink" for path in found}
        return [
            f"{path} lies next to layers that shard_col cuts; say partial_grad('{path}') if it sees what a rank has "
            f"for itself, or replicated('{path}')"
            for path, module in self.model.named_modules()
            if path.rpartition(".")[0] in parents and path not in said and any(True for _ in module.parameters())
            if not any(one.startswith(f"{path}.") for one in said)
        ]

    def _whole_counts(self) -> list[str]:
        """Return problems of modules that would split a rank's share of the features by unsharded head counts."""
        shrunk, problems = self._matches["shrink"], []
        for path, arguments in self._matches["shard_col"].items():
            parent = path.rpartition(".")[0]
            if arguments.get("gather_output") or (parent in shrunk and not shrunk[parent]):
                continue
            features, stride = out_features(self.model.get_submodule(path)), arguments.get("stride", 1)
            counts = whole_counts(self.model.get_submodule(parent), features, stride)
            for name, value in counts.items():
                if name not in shrunk.get(parent, ()):
                    problems.append(
                        f"shard_col cuts {path}, and {parent or type(self.model).__name__} computes with "
                        f"{name}={value} as of the whole layer; add .shrink({{'{parent}': {{'{name}'}}}}), or "
                        f".shrink({{'{parent}': set()}}) if it is right for a rank's share"
                    )
        return list(dict.fromkeys(problems))


def _column(module: nn.Module, arguments: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
    stride, options = arguments.get("stride", 1), {}
    if stride > 1:
        options["part_size"] = out_features(module) // stride
    options |= {name: arguments[name] for name in ("gather_output", "num_heads") if name in arguments}
    return ColumnParallelLinear, options


def _row(module: nn.Module, arguments: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
    options = {"num_heads": arguments["num_heads"]} if "num_heads" in arguments else {}
    return RowParallelLinear, options | {"splits_input": not arguments.get("input_is_parallel", True)}


_REPLACEMENTS: dict[str, Callable[[nn.Module, Mapping[str, Any]], tuple[type, dict[str, Any]]]] = {
    "shard_col": _column,
    "shard_row": _row,
    "shard_vocab": lambda module, arguments: (VocabParallelEmbedding, {}),
    "parallel_drop": lambda module, arguments: (ParallelDropout, {}),
}


_KINDS: dict[str, tuple[Callable[[nn.Module], bool], str]] = {
    "shard_col": (is_linear, "an nn.Linear or a Conv1D"),
    "shard_row": (is_linear, "an nn.Linear or a Conv1D"),
    "shard_vocab": (lambda module: isinstance(module, nn.Embedding), "an nn.Embedding"),
    "replic_drop": (lambda module: isinstance(module, nn.Dropout), "an nn.Dropout"),
    "parallel_drop": (lambda module: isinstance(module, nn.Dropout), "an nn.Dropout"),
}


def _in_order(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the rules, so that their text is the same on every rank: sets have no order."""
    return {name: sorted(said) if isinstance(said, set) else said for name, said in sorted(rules.items())}


def _block(model: nn.Module, path: str) -> str:
    """Return the path of the innermost layer that contains a module, or "" without one.

    A list whose entries are of several classes, such as a linear layer and its dropout, is no list of layers.
    """
    parts, found = path.split("."), ""
    for position, part in enumerate(parts):
        entries = model.get_submodule(".".join(parts[:position])).children() if part.isdecimal() else ()
        if len({type(entry) for entry in entries}) == 1:
            found = ".".join(parts[: position + 1])
    return found
