"""Stage layouts of models: recorded in the order in which their parts run, or inferred from the module tree."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from os.path import commonprefix
from typing import Any

from torch import nn

from shardformer.stages.earlier_modules import MetaModule
from shardformer.stages.layout import chained
from shardformer.stages.stage import (
    IdentityPlaceholder,
    Received,
    ReceivedByTower,
    StageLayout,
    StagePlaceholder,
    UnreachablePlaceholder,
    ZeroEmbedding,
)
from shardformer.utils.module_paths import starred
from shardformer.utils.source import inputs_between_layers, syntax_of

# Inputs that the first stage turns into embeddings; later stages do not read them.
ENCODED_INPUTS = (
    "pixel_values",
    "pixel_values_videos",
    "pixel_attention_mask",
    "input_features",
    "input_audio_embeds",
    "audio_values",
)
_FEATURES = re.compile(r"get_(?!cls|text)\w+_features")
# The output of these modules is added to the token embeddings.
_POSITIONS = ("embed_positions", "position_embeddings", "positions_embed", "wpe")


def layer_paths(model: nn.Module, plan: Mapping[str, str]) -> str | None:
    """Return the path of the layer list that most of the plan names; without one, the path of the largest list."""
    lists = Counter(
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for pattern in plan
        if re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path) == pattern.partition(".*.")[0]
    )
    if lists:
        return lists.most_common(1)[0][0]
    sizes = {
        path: sum(parameter.numel() for parameter in module.parameters())
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    return max(sizes, key=sizes.__getitem__) if sizes else None


def stage_layout(model: nn.Module, layers: str | None, root: str = "", runs_once: bool = False) -> StageLayout | None:
    """Build a layout for the layer list `layers`, assuming that modules run in registration order.

    Modules registered before the list, on any level, run before it, and so do those that turn images or sounds into
    embeddings (`feature_modules`); other modules registered after it run after it. Modules without parameters (rotary
    tables) stay on every stage. A pooler, and the modules of a head class outside its base model, run after the layers
    regardless of their order. Only modules below `root` are considered. None if there are no layers, or if they run
    several times in a pass, unless a declaration says that they run once.
    """
    if layers is None or len(model.get_submodule(layers)) == 0 or (not runs_once and _run_again(model, layers)):
        return None
    first: dict[str, type[StagePlaceholder]] = {}
    last: list[str] = []
    every: list[str] = []  # also parameters that modules own directly: class tokens, layer weights
    parts, features = layers.split("."), feature_modules(model, [layers])
    for depth in range(len(root.split(".")) if root else 0, len(parts)):
        parent = ".".join(parts[:depth])
        every += [_below(parent, name) for name in model.get_submodule(parent)._parameters]
        seen = depth == 0 and parts[0] == getattr(model, "base_model_prefix", None)
        for name, module in with_parameters(model.get_submodule(parent)):
            if name == parts[depth]:
                seen = True
            elif "rotary" in name:  # whose learned frequencies all layers read (Mistral Large 4)
                every.append(_below(parent, name))
            elif (seen and _below(parent, name) not in features) or name == "pooler":
                last.append(_below(parent, name))
            else:
                first[_below(parent, name)] = placeholder_for(module, name)
    layer, runner = model.get_submodule(layers)[0], model.get_submodule(".".join(parts[:-1]))
    skips_encoders = any(placeholder is UnreachablePlaceholder for placeholder in first.values())
    return StageLayout(
        layers=layers,
        first=first,
        every=tuple(every),
        last=tuple(last),
        tuple_output=num_outputs(layer),
        first_inputs=ENCODED_INPUTS if skips_encoders else (),
        inputs_between=() if root else inputs_between_layers(type(runner), parts[-1]),
    )


def _run_again(model: nn.Module, layers: str) -> bool:
    """Return whether the owner of a layer list loops over it in another `for` (Dory, Inkling 2 Loop)."""
    parent, _, name = layers.rpartition(".")
    try:
        tree = syntax_of(type(model.get_submodule(parent)).forward)
    except OSError:  # a model without source
        return False
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    inner = [each for outer in loops for each in ast.walk(outer) if isinstance(each, ast.For) and each is not outer]
    return any(
        isinstance(node, ast.Attribute) and node.attr == name and _is_self(node.value)
        for loop in inner
        for node in ast.walk(loop.iter)
    )


def chain_layout(model: nn.Module, lists: Sequence[str]) -> StageLayout:
    """Build a layout for the layer lists at `lists`, assuming that modules run in registration order.

    A module between two lists runs at the end of the first of them if it is nearer to it in the module tree, and
    before the second otherwise. Another list with as many modules as there are lists has one module for each.
    Poolers, and the modules of a head class outside its base model, run after all lists.
    """
    first: list[dict] = [{} for _ in lists]
    last: list[list[str]] = [[] for _ in lists]
    every: list[str] = []
    done = 0  # number of lists that have been passed

    def place(path: str, name: str, module: nn.Module, is_head: bool) -> None:
        if is_head or name == "pooler" or done == len(lists):
            last[-1].append(path)
        elif done and _common(path, lists[done - 1]) > _common(path, lists[done]):
            last[done - 1].append(path)
        else:
            first[done][path] = placeholder_for(module, name)

    def visit(path: str) -> None:
        nonlocal done
        owner = model.get_submodule(path)
        every.extend(f"{path}.{name}" if path else name for name in owner._parameters)
        base = getattr(model, "base_model_prefix", None)
        has_base = not path and hasattr(model, base or "")
        is_behind_base = False
        for name, module in with_parameters(owner):
            child = f"{path}.{name}" if path else name
            if child in lists:
                done += 1
            elif any(each.startswith(f"{child}.") for each in lists):
                visit(child)
            elif isinstance(module, nn.ModuleList) and len(module) == len(lists) and done < len(lists):
                for index, each in enumerate(module):
                    first[index][f"{child}.{index}"] = placeholder_for(each, name)
            else:
                place(child, name, module, is_head=has_base and is_behind_base)
            is_behind_base = is_behind_base or name == base

    visit("")
    return chained(
        [
            StageLayout(
                layers=path,
                first=first[index],
                every=tuple(every) if index == 0 else (),
                last=tuple(last[index]),
                tuple_output=num_outputs(model.get_submodule(path)[0]),
            )
            for index, path in enumerate(lists)
        ]
    )


def _common(path: str, other: str) -> int:
    """Return the number of leading parts that two paths have in common."""
    pairs = zip(path.split("."), other.split("."), strict=False)
    return next((index for index, (one, two) in enumerate(pairs) if one != two), 0)


def tower_layout(
    model: nn.Module,
    encoder: str,
    decoder: str,
    placeholder_of: Callable[[str], type[StagePlaceholder] | None] = lambda path: None,
) -> StageLayout | None:
    """Build a layout for the layer lists of an encoder and its decoder.

    Modules outside both towers run after the decoder, except embeddings, which the towers share, and modules for which
    `placeholder_of` returns a placeholder: these run before the encoder.
    """
    roots = [path.rpartition(".")[0] for path in (encoder, decoder)]
    layouts = [stage_layout(model, path, root) for path, root in zip((encoder, decoder), roots, strict=True)]
    if None in layouts:
        return None
    first, last = dict(layouts[0].first), list(layouts[1].last)
    parts = roots[0].split(".")
    for depth in range(len(parts)):
        parent = ".".join(parts[:depth])
        for name, module in with_parameters(model.get_submodule(parent)):
            path = _below(parent, name)
            if any(root == path or root.startswith(f"{path}.") for root in roots):
                continue
            if (declared := placeholder_of(path)) is not None:
                first[path] = declared
            elif isinstance(module, nn.Embedding):
                first[path] = ReceivedByTower
            else:
                last.append(path)
    behind = replace(layouts[1], last=tuple(last))
    shared = len(commonprefix([root.split(".") for root in roots]))
    whole_encoder = ".".join(parts[: shared + 1])  # its forward may use modules around the layers
    finished_towers = {whole_encoder: ("last_hidden_state",)}
    return replace(layouts[0], first=first, finished_towers=finished_towers, next_layers=behind)


def feature_modules(model: nn.Module, lists: Iterable[str]) -> set[str]:
    """Return the paths of the modules that turn images or sounds into embeddings, before the layers of text run.

    They are those that `get_image_features` and the like call. Methods that call the layers themselves are left out:
    their modules run around the layers.

    Args:
        lists: paths of the layer lists.
    """
    found: set[str] = set()
    for path, module in model.named_modules():
        for method in filter(_FEATURES.fullmatch, dir(type(module))):
            called = {_below(path, name) for name in _modules_called_by(module, method, set())}
            if not any(is_below(layers, called) for layers in lists):
                found |= called
    return found


def is_below(path: str, modules: Iterable[str]) -> bool:
    """Return whether a path is that of one of the modules, or of a part of one."""
    return any(f"{path}.".startswith(f"{each}.") for each in modules)


def _modules_called_by(module: nn.Module, method: str, seen: set[str]) -> set[str]:
    """Return the names of the children that a method of `module` reads, itself or by other methods."""
    seen.add(method)
    try:
        tree = syntax_of(getattr(type(module), method))
    except OSError:  # a model without source
        return set()
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
    found = names & module._modules.keys()
    for name in names - seen - {"forward"}:
        if inspect.isfunction(getattr(type(module), name, None)):
            found |= _modules_called_by(module, name, seen)
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def with_parameters(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children of `module` that have parameters."""
    return [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]


def _below(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def placeholder_for(module: nn.Module, name: str) -> type[StagePlaceholder]:
    """Return the placeholder on later stages for a module called `name` that runs before the layers."""
    if name in _POSITIONS:
        return ZeroEmbedding
    if isinstance(module, nn.Embedding) or name == "embeddings":
        return Received
    # An encoder of another modality is not called if its inputs are not given.
    is_tower = any(isinstance(inner, nn.ModuleList) for inner in module.modules())
    return UnreachablePlaceholder if is_tower else IdentityPlaceholder


def num_outputs(layer: nn.Module) -> int:
    """Return the length of the tuple that `layer`'s source returns; 0 for a bare hidden state."""
    tree = syntax_of(type(layer).forward)
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None]
    if not returned:
        return 0
    value = returned[-1]
    if isinstance(value, ast.Name):
        assigned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) and _assigns(node, value.id)]
        value = next((each for each in map(_first_part, assigned) if isinstance(each, ast.Tuple)), value)
    value = _first_part(value)
    return len(value.elts) if isinstance(value, ast.Tuple) else 0


def _first_part(value: ast.expr) -> ast.expr:
    """Return the left operand of a concatenation such as (hidden state, …) + rest; else the value itself."""
    return value.left if isinstance(value, ast.BinOp) else value


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


@dataclass(frozen=True)
class ExecutionOrder:
    """The order in which the layer lists of a model and the modules around them run.

    Paths are relative to the base model, with `*` for numbers. Modules that are not named run after the layers.

    Attributes:
        order: paths of layer lists and modules, in the order in which they run. Those of one entry run in turn: the
            first of each, then the second of each.
        layers: those that are layer lists; the value is the length of the tuple that a layer returns (0 for a bare
            tensor) if its first element has the shape of the layer's input, and -1 if it has not.
        parts: path of a module that runs after the layer with the same number -> path of the layer list.
        ahead: path of a module that runs before the layer with the same number -> path of the layer list.
        every: modules that run on all stages.
        kept: path of a module or layer whose output later stages read -> see `StageLayout.kept_outputs`. The number -1
            stands for the last layer of a list.
        opened: modules that are never called; the model calls their children.
        calls_forward: see `StageLayout`.
        behind: modules of the base model that run after the layers; None for all that are not named.
        otherwise: the order of another configuration of the class, whose base model has further modules.
    """

    order: Sequence[Sequence[str]]
    layers: Mapping[str, int]
    parts: Mapping[str, str] = field(default_factory=dict)
    ahead: Mapping[str, str] = field(default_factory=dict)
    every: Sequence[str] = ()
    kept: Mapping[str, int] = field(default_factory=dict)
    opened: Sequence[str] = ()
    calls_forward: bool = False
    behind: Sequence[str] | None = None
    otherwise: ExecutionOrder | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the order in the terms of JSON, without fields that are empty."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        found["otherwise"] = self.otherwise and self.otherwise.to_dict()
        return {name: value for name, value in found.items() if value or (name == "behind" and value is not None)}

    @staticmethod
    def from_dict(found: Any) -> ExecutionOrder:
        """Build an order from its JSON form; raises ValueError if the object is not that of an order."""
        known = [each.name for each in fields(ExecutionOrder)]
        if not isinstance(found, Mapping) or not {"order", "layers"} <= found.keys() <= set(known):
            raise ValueError(f"stages are an object with 'order' and 'layers', and no keys but {', '.join(known)}")
        other = found.get("otherwise")
        return ExecutionOrder(**{**found, "otherwise": None if other is None else ExecutionOrder.from_dict(other)})

    def layout(self, model: nn.Module) -> StageLayout | None:
        """Return the stage layout of a model; None if its parts are others, so that they run in an unknown order."""
        return self._layout(model) or (self.otherwise and self.otherwise.layout(model))

    def _layout(self, model: nn.Module) -> StageLayout | None:
        prefix = f"{getattr(model, 'base_model_prefix', '')}."

        def name(path: str) -> str:
            return starred(path.removeprefix(prefix))

        paths = [path for path, module in model.named_modules() if name(path) in self.layers and len(module)]
        lists = sorted(paths, key=lambda path: self._key(path, prefix))
        if {name(path) for path in lists} != set(self.layers):
            return None
        starts = [self._key(path, prefix) for path in lists]
        found = [self._of_list(path, self.layers[name(path)]) for path in lists]
        first: list[dict[str, type[MetaModule]]] = [{} for _ in lists]
        last, parts = list[str](), [dict[str, int]() for _ in lists]
        features = feature_modules(model, lists)
        opened = {path for path, _ in model.named_modules() if name(path) in self.opened}
        every = list(own_parameters(model, lists, opened))
        for path in units_of(model, lists, opened):
            if name(path) in self.every:
                every.append(path)
            elif name(path) in (around := {**self.parts, **self.ahead}):
                index = next((at for at, each in enumerate(lists) if name(each) == around[name(path)]), None)
                if index is None:  # another release of transformers has other lists
                    return None
                number = int(path.rpartition(".")[2]) - (name(path) in self.ahead)
                if number < 0:
                    first[index][path] = MetaModule
                else:
                    parts[index][path] = number
            else:
                key = self._key(path, prefix)
                default = 0 if key is None and is_below(path, features) else None  # the batch had no images
                after = next((at for at, start in enumerate(starts) if key is not None and key < start), default)
                is_of_base = path.startswith(prefix) or not hasattr(model, prefix[:-1] or ".")
                if after is not None:
                    first[after][path] = MetaModule
                elif key is None and is_of_base and self.behind is not None and name(path) not in self.behind:
                    return None  # a part that another configuration has
                else:
                    last.append(path)
        layout = None
        for index in reversed(range(len(lists))):
            is_last = index == len(lists) - 1
            placed = (*first[index], *parts[index], *(last if is_last else ()))
            layout = replace(
                found[index],
                first=first[index],
                every=tuple(every) if index == 0 else (),
                last=tuple(last) if is_last else (),
                layer_parts=parts[index],
                kept_outputs={path: self.kept[name(path)] for path in placed if name(path) in self.kept}
                | self._kept_layers(lists[index], name(lists[index]), len(model.get_submodule(lists[index]))),
                next_layers=layout,
            )
        return layout

    def _of_list(self, path: str, outputs: int) -> StageLayout:
        """Return the layout of the list at `path`, see `layers` for the outputs."""
        return StageLayout(
            layers=path,
            tuple_output=max(outputs, 0),
            changes_shapes=True,
            skips_layers=outputs >= 0,
            calls_forward=self.calls_forward,
        )

    def _kept_layers(self, path: str, name: str, length: int) -> dict[str, int]:
        """Return the kept outputs of the list at `path`, which is called `name`."""
        if f"{name}.*" in self.kept:
            return {f"{path}.{number}": self.kept[f"{name}.*"] for number in range(length)}
        return {f"{path}.{length - 1}": self.kept[f"{name}.-1"]} if f"{name}.-1" in self.kept else {}

    def _key(self, path: str, prefix: str) -> tuple[int, ...] | None:
        """Return what orders the paths that `order` names; None for others."""
        path = path.removeprefix(prefix)
        numbers = [int(part) for part in path.split(".") if part.isdecimal()]
        for index, group in enumerate(self.order):
            if starred(path) in group:
                turn = numbers[0] if len(group) > 1 and numbers else -1
                return (index, turn, list(group).index(starred(path)), *numbers)
        return None


def units_of(model: nn.Module, lists: Iterable[str], opened: Iterable[str] = ()) -> Iterator[str]:
    """Yield paths of the largest modules with parameters around `lists`; `opened`: whose children are meant."""
    lists, opened = set(lists), set(opened)

    def visit(path: str, module: nn.Module) -> Iterator[str]:
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            if below in lists or next(child.parameters(), None) is None:
                continue
            is_open = below in opened or isinstance(child, nn.ModuleList | nn.ModuleDict)
            if is_open or any(each.startswith(f"{below}.") for each in lists):
                yield from visit(below, child)
            else:
                yield below

    yield from visit("", model)


def own_parameters(model: nn.Module, lists: Iterable[str], opened: Iterable[str]) -> Iterator[str]:
    """Yield the paths of parameters that the modules around layer lists own directly."""
    units = [*units_of(model, lists, opened), *lists]
    for name, _ in model.named_parameters():
        if not any(name.startswith(f"{unit}.") for unit in units):
            yield name
