"""Plans of families that transformers gives none, in the terms of those that it gives."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

from torch import nn

from shardformer.policies.plans.stage_inference import layer_paths, stage_layout, tower_layout
from shardformer.stages.stage import StageLayout, StagePlaceholder
from shardformer.utils.module_paths import starred

Value = TypeVar("Value")
_FAMILY = re.compile(r"transformers\.models\.(\w+)\.")


@dataclass(frozen=True)
class DeclaredPlan:
    """How one family is sharded. Every path is the end of one: "self_attn.q_proj" is that of each layer.

    Attributes:
        styles: path of a module or parameter -> tensor-parallel style; None for those of the model's own plan.
        local: path of a module -> its attributes that count heads or features, of which a rank has its share.
        layers: path of the list of layers that stages are cut from; None for the list that the styles are about.
        towers: paths of the lists of layers of an encoder and of its decoder.
        first: stand-ins on later stages for modules in front of the layers, where the tree does not tell.
        every: modules that all stages need.
        last: modules behind the layers that are registered in front of them.
        carries: inputs of the layers that an earlier layer has computed.
        needs: fields of the configuration -> the only value with which the family can be sharded.
        beside: paths of the lists of parts of the same layers.
        layer_outputs: elements of the tuple that a layer returns, where its source does not tell.
        pipelined: whether stages can be cut from the family at all.
        cut_vocabulary: whether the embedding and the head are cut over the vocabulary.
        whole_logits: whether the head's logits are gathered at once, because the model does something with them.
    """

    styles: Mapping[str, str] | None
    local: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layers: str | None = None
    towers: tuple[str, ...] = ()
    first: Mapping[str, type[StagePlaceholder]] = field(default_factory=dict)
    every: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    carried_inputs: tuple[str, ...] = ()
    needs: Mapping[str, Any] = field(default_factory=dict)
    sublayer_lists: tuple[str, ...] = ()
    layer_outputs: int | None = None
    pipelined: bool = True
    cut_vocabulary: bool = True
    whole_logits: bool = False

    def styles_of(self, model: nn.Module) -> dict[str, str]:
        """Path of the model with `*` for numbers -> style."""
        if self.styles is None:
            return dict(model.tp_plan)
        names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
        found = {pattern: _lookup(pattern, self.styles) for pattern in {starred(name) for name in names}}
        return {pattern: style for pattern, style in found.items() if style is not None}

    def local_values(self, path: str, module: nn.Module, tp_size: int) -> dict[str, int]:
        """Attributes of the module at `path` -> this rank's share."""
        names = _lookup(starred(path), self.local) or ()
        return {name: getattr(module, name) // tp_size for name in names if hasattr(module, name)}

    def check(self, model: nn.Module) -> list[str]:
        """Sentences on fields of the configuration that keep the model from being sharded."""
        config, name = model.config, type(model).__name__
        return [
            f"{name} with {field}={getattr(config, field)!r} cannot be sharded; use {field}={value!r}"
            for field, value in self.needs.items()
            if getattr(config, field, value) != value
        ]

    def stages_of(self, model: nn.Module) -> StageLayout | None:
        """Where the model may be cut."""
        if not self.pipelined:
            return None
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        towers = [next((name for name in lists if _ends(name, end)), None) for end in self.towers]
        if towers and None not in towers:
            layout = tower_layout(model, *towers)
        else:
            named = next((name for name in lists if self.layers is not None and _ends(name, self.layers)), None)
            layout = stage_layout(model, named or layer_paths(model, self.styles_of(model)))
        return None if layout is None else self._corrected(layout, model)

    def _corrected(self, layout: StageLayout, model: nn.Module) -> StageLayout:
        """The layout of the tree, with what the plan says of single modules."""
        paths = [name for name, _ in model.named_modules()]
        every = tuple(path for path in paths if any(_ends(path, end) for end in self.every))
        moved = tuple(path for path in paths if any(_ends(path, end) for end in self.last))
        sublayer_lists = tuple(next(path for path in paths if _ends(path, end)) for end in self.sublayer_lists)
        first = {
            path: _lookup(path, self.first) or placeholder
            for path, placeholder in layout.first.items()
            if path not in (*every, *moved, *sublayer_lists)
        }
        last = (*(path for path in layout.last if path not in (*every, *sublayer_lists)), *moved)
        next_layers = None if layout.next_layers is None else self._corrected(layout.next_layers, model)
        outputs = layout.tuple_output if self.layer_outputs is None else self.layer_outputs
        return replace(
            layout,
            first=first,
            every=(*layout.every, *every),
            last=last,
            tuple_output=outputs,
            carried_inputs=_read_by(model.get_submodule(layout.layers)[0], self.carried_inputs),
            sublayer_lists=sublayer_lists,
            next_layers=next_layers,
        )


def _read_by(layer: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Those of `names` that the layer has as inputs: a decoder's layers may go without what its encoder's hand on."""
    return tuple(name for name in names if name in inspect.signature(layer.forward).parameters)


def _ends(path: str, end: str) -> bool:
    return path == end or path.endswith(f".{end}")


def _lookup(path: str, table: Mapping[str, Value]) -> Value | None:
    """The value of the longest end of `path` in the table."""
    ends = [end for end in table if _ends(path, end)]
    return table[max(ends, key=len)] if ends else None


@cache
def declared_plans() -> dict[str, DeclaredPlan]:
    """Family of transformers -> its plan: the tables `PLANS` of the modules of `plans.tables`."""
    package = importlib.import_module("shardformer.policies.plans.tables")
    names = [info.name for info in pkgutil.iter_modules(package.__path__)]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return {family: plan for module in modules for family, plan in getattr(module, "PLANS", {}).items()}


def declared_plan_of(cls: type) -> DeclaredPlan | None:
    """The plan of the family that a model class of transformers belongs to."""
    found = _FAMILY.match(cls.__module__)
    return declared_plans().get(found[1]) if found else None
