"""ExecutionOrder: the order in which the parts of a model run, and the stage layout that follows from it.

The module tree does not tell in which order modules run. The order is therefore recorded
(`shardformer.policies.proposed.execution`), and kept by path without numbers, so that it holds for any depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn

from shardformer.policies.plans.stage_inference import feature_modules, is_below
from shardformer.stages.earlier_modules import MetaModule
from shardformer.stages.stage import StageLayout
from shardformer.utils.module_paths import starred


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
        """Build an order from its JSON form.

        Raises:
            ValueError: the object is not that of an order.
        """
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
    """Yield the paths of the modules with parameters around the layer lists at `lists`, the largest possible.

    Args:
        opened: modules of which the children are meant.
    """
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
