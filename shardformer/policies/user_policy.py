"""Policies that what a user writes is lowered to: a plan of styles, with the pipeline stages of the model's family.

`UniformPolicy` shards every linear layer by itself, with whole activations between layers. A column-parallel layer
gathers its outputs. A row-parallel layer slices its full input and sums the outputs. This needs one more collective per
pair of layers than Megatron-LM's pairing of column and row layers, but works for any model.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from torch import nn

from shardformer.attention import log_once
from shardformer.layers import ParallelModule
from shardformer.layers.linear import out_features
from shardformer.matmul.native import is_linear
from shardformer.policies.base import (
    ModulePolicyDescription,
    Origin,
    PlanEntry,
    Policy,
    SubModuleReplacementDescription,
)
from shardformer.policies.feature_counts import whole_counts
from shardformer.policies.plans.stages import layer_paths, stage_layout
from shardformer.policies.plans.styles import lowered
from shardformer.policies.registry import policy_for
from shardformer.policies.user_forms import Argument, Col_Layer, Layer, Row_Layer, TPInfo
from shardformer.shard_config import ShardConfig
from shardformer.stages.stage import StageLayout
from shardformer.utils.derived_modules import replace_modules, with_class
from shardformer.utils.module_paths import ends_in, has_module, join, nearest_names


class UserPolicy(Policy):
    """Base class of policies that define their own plan of styles and take the rest from the family's policy.

    `entries` gives the style of each part, by its path in the model. The rest is the stage layout and the preparation
    of the model. For a model without a family policy the layout is inferred from the module tree. The family's policy
    gets a config with tensor parallelism disabled.
    """

    replicate_unlisted = True
    supports_sequence_parallel = False
    supports_ulysses = False

    @cached_property
    def family_policy(self) -> Policy | None:
        """The policy of the model's family; None if the family is unknown."""
        try:
            return policy_for(self.model)
        except ValueError:
            return None

    @cached_property
    def stages(self) -> StageLayout | None:
        """The stage layout of the family, or one at the model's largest list of layers."""
        if self.family_policy is not None:
            return self.family_policy.stages
        if type(self.model).__module__.startswith("diffusers."):
            return None  # blocks read embeddings of the time and of a text, and return two hidden states
        return stage_layout(self.model, layer_paths(self.model, {}))

    @property
    def base_path(self) -> str:
        """Path of the base model according to the family's policy."""
        return "" if self.family_policy is None else self.family_policy.base_path

    @property
    def inner(self) -> Sequence[Policy]:
        """The family's policy."""
        return () if self.family_policy is None else (self.family_policy,)

    def set_model(self, model: nn.Module) -> None:
        """Set the model, also of the family's policy, which is looked up again."""
        super().set_model(model)
        for name in ("family_policy", "stages"):
            self.__dict__.pop(name, None)
        if self.family_policy is not None:
            self.family_policy.set_model(model)

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Set the sharding options, for the family's policy without tensor parallelism."""
        super().set_shard_config(shard_config)
        if self.family_policy is not None:
            whole = copy.copy(shard_config)
            whole.enable_tensor_parallelism = False
            self.family_policy.set_shard_config(whole)

    def head_counts(self) -> Mapping[str, int]:
        """Return no head counts: the tensor-parallel size need not divide any."""
        return {}

    @abstractmethod
    def entries(self) -> Mapping[str, PlanEntry]:
        """Return the style of each part, by its path in the model."""

    def module_policy(self) -> dict[str, ModulePolicyDescription]:
        """Return the table that the plan is lowered to, by paths of the model."""
        entries = self.entries()
        owners = [(path.rpartition(".")[0], path.rpartition(".")[2]) for path in entries]
        return lowered(self, [(path, self.model.get_submodule(path), name) for path, name in owners], entries)

    def preprocess(self) -> nn.Module:
        """Prepare the model as the family's policy does."""
        return self.model if self.family_policy is None else self.family_policy.preprocess()

    def postprocess(self) -> nn.Module:
        """Finish the model as the family's policy does."""
        return self.model if self.family_policy is None else self.family_policy.postprocess()


class UniformPolicy(UserPolicy):
    """Shards the linear layers of any model.

    Layers with tied weights, and layers with fewer features than ranks, are replicated.

    Args:
        dim: -1 shards the output features and gathers the outputs; 0 shards the input features and sums the outputs.
    """

    origin = Origin.UNIFORM

    cuts_attention = False

    def __init__(self, dim: Literal[0, -1]) -> None:
        super().__init__()
        self._dim = dim

    def entries(self) -> Mapping[str, PlanEntry]:
        """Return the style of every linear layer of the model."""
        held = Counter(id(param) for _, param in self.model.named_parameters(remove_duplicate=False))
        size = self.shard_config.tensor_parallel_size
        style = "colwise_gather_output" if self._dim == -1 else "rowwise_split_input"
        return {
            path: PlanEntry(style, self.origin)
            for path, module in self.model.named_modules()
            if type(module) is nn.Linear or type(module).__name__ == "Conv1D"
            if held[id(module.weight)] == 1 and min(module.weight.shape) >= size
        }


class TPInfoPolicy(UserPolicy):
    """Policy built from a `TPInfo`."""

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

    def entries(self) -> Mapping[str, PlanEntry]:
        """Return the styles that the rules stand for, by paths of the model."""
        found = {
            path: PlanEntry(style, self.origin, _options(arguments))
            for kind, style in _STYLES.items()
            for path, arguments in self._matches[kind].items()
            if self._accepts(kind, path)
        }
        return found | {path: PlanEntry("lm_head", self.origin) for path in self._tied_heads}

    def module_policy(self) -> dict[str, ModulePolicyDescription]:
        """Return the table that the rules are lowered to, by paths of the model."""
        table = super().module_policy()
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

    def _accepts(self, kind: str, path: str) -> bool:
        return kind not in _KINDS or _KINDS[kind][0](self.model.get_submodule(path))

    def _wrong_kinds(self) -> list[str]:
        problems = []
        for kind, (_, words) in _KINDS.items():
            for path in self._matches[kind]:
                if not self._accepts(kind, path):
                    found = type(self.model.get_submodule(path)).__name__
                    problems.append(f"{kind}: {path} is a {found}; name {words}")
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


# Kind of a rule -> the style that it stands for, and the option of the style that each argument of a layer gives.
_STYLES = {
    "shard_col": "colwise",
    "shard_row": "rowwise",
    "shard_vocab": "embedding_rowwise",
    "replic_drop": "replicate",
    "parallel_drop": "dropout",
    "replicated": "replicate",
    "partial_grad": "replicated_with_grad_allreduce",
}
_OPTIONS = {"stride": "stride", "num_heads": "num_heads", "gather_output": "gather"}


_KINDS: dict[str, tuple[Callable[[nn.Module], bool], str]] = {
    "shard_col": (is_linear, "an nn.Linear or a Conv1D"),
    "shard_row": (is_linear, "an nn.Linear or a Conv1D"),
    "shard_vocab": (lambda module: isinstance(module, nn.Embedding), "an nn.Embedding"),
    "replic_drop": (lambda module: isinstance(module, nn.Dropout), "an nn.Dropout"),
    "parallel_drop": (lambda module: isinstance(module, nn.Dropout), "an nn.Dropout"),
}


def _options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a style that the arguments of a layer stand for."""
    options = {_OPTIONS[name]: value for name, value in arguments.items() if name in _OPTIONS}
    return options if arguments.get("input_is_parallel", True) else options | {"splits_input": True}


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

    def entries(self) -> Mapping[str, PlanEntry]:
        """Return the styles that the slots stand for, by paths of the model; without layers of a user's own class."""
        return {
            join(path, layer.path): self._entry(slot, layer, module.get_submodule(layer.path))
            for path, module, slot, layer in self._layers()
            if has_module(module, layer.path) and not _is_of_users(layer)
        }

    def module_policy(self) -> dict[str, ModulePolicyDescription]:
        """Return the table that the slots are lowered to, by paths of the model."""
        table = super().module_policy()
        for path, module, _, layer in self._layers():
            if _is_of_users(layer) or not has_module(module, layer.path):  # which the engine refuses by name
                change = SubModuleReplacementDescription(layer.path, layer.replace_layer, {}, layer.ignore)
                table.setdefault(path, ModulePolicyDescription()).sub_module_replacement.append(change)
        for path, _, argument in self._described() if self.shard_config.tensor_parallel_size > 1 else ():
            if argument.attr_dict:
                description = table.setdefault(path, ModulePolicyDescription())
                description.param_replacement.append(_setter(argument.attr_dict))
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

    def _described(self) -> Iterator[tuple[str, nn.Module, Argument]]:
        """Yield the modules of the classes that `argument_policy` names."""
        named = {cls.__name__: argument for cls, argument in self._arguments().items()}
        for path, module in self.model.named_modules():
            classes = (cls.__name__ for cls in type(module).__mro__)
            if (name := next((name for name in classes if name in named), None)) is not None:
                yield path, module, named[name]

    def _layers(self) -> Iterator[tuple[str, nn.Module, str, Layer]]:
        """Yield the layers of all slots: path of the module, module, name of the slot, layer."""
        for path, module, argument in self._described():
            yield from ((path, module, slot.__name__, layer) for slot in argument.param_funcs for layer in slot())

    def _entry(self, slot: str, layer: Layer, native: nn.Module) -> PlanEntry:
        if isinstance(layer, Row_Layer):
            return PlanEntry("rowwise", self.origin)
        if not isinstance(layer, Col_Layer):
            return PlanEntry("replicate", self.origin)
        if isinstance(native, nn.Embedding):
            return PlanEntry("embedding_rowwise", self.origin)
        if slot == "unembedding":
            return PlanEntry("lm_head", self.origin)
        return PlanEntry("colwise", self.origin, {"gather": layer.gather_output, "stride": layer.n_cast or 1})


def _is_of_users(layer: Layer) -> bool:
    """Return whether a parallel layer of a class that the user gives replaces the layer."""
    return layer.replace_layer is not None and issubclass(layer.replace_layer, ParallelModule)


def _setter(attributes: Mapping[str, Any]) -> Callable[[nn.Module], None]:
    def set_all(module: nn.Module) -> None:
        for path, value in attributes.items():
            owner, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner), name, value)

    return set_all
