"""Declared plans for families without a plan in transformers, in the terms of transformers' plans."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from shardformer.loss.heads import USUAL_HEAD_LOSSES, HeadLosses
from shardformer.policies.plans.delta_net import delta_net_styles
from shardformer.policies.plans.execution_order import ExecutionOrder
from shardformer.policies.plans.latent_attention import latent_attention_styles
from shardformer.policies.plans.stage_inference import (
    ENCODED_INPUTS,
    layer_paths,
    num_outputs,
    placeholder_for,
    stage_layout,
    tower_layout,
    with_parameters,
)
from shardformer.policies.plans.styles import ATTENTION_HEADS
from shardformer.stages.placeholders import States
from shardformer.stages.stage import StageLayout, StagePlaceholder, UnreachablePlaceholder
from shardformer.utils.module_paths import join, starred
from shardformer.utils.structure import divisors_phrase


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
    return _linked(model, lists, first, last, every)


def _linked(
    model: nn.Module,
    lists: Sequence[str],
    first: Sequence[Mapping],
    last: Sequence[Sequence[str]],
    every: Sequence[str],
) -> StageLayout:
    layout = None
    for index in reversed(range(len(lists))):
        layout = StageLayout(
            layers=lists[index],
            first=first[index],
            every=tuple(every) if index == 0 else (),
            last=tuple(last[index]),
            tuple_output=num_outputs(model.get_submodule(lists[index])[0]),
            next_layers=layout,
        )
    return layout


def _common(path: str, other: str) -> int:
    """Return the number of leading parts that two paths have in common."""
    pairs = zip(path.split("."), other.split("."), strict=False)
    return next((index for index, (one, two) in enumerate(pairs) if one != two), 0)


Value = TypeVar("Value")
_FAMILY = re.compile(r"transformers\.models\.(\w+)\.")


def styles_of_transformers(model: nn.Module) -> dict[str, str]:
    """Return the styles of transformers' own plan of a model, and of heads that it leaves whole or gathers.

    Experts whose output projections are cut between inputs return partial sums. Where no entry adds them up, as for
    Qwen3-Omni in transformers 5.17, one is added.
    """
    latent, delta = latent_attention_styles(model, ATTENTION_HEADS), delta_net_styles(model, ATTENTION_HEADS)
    found = latent | (model.tp_plan or {}) | delta
    owners = (path.rpartition(".")[0] for path, style in found.items() if style == "rowwise")
    return {owner: "moe_tp_experts" for owner in owners if owner.endswith(".experts")} | found


@dataclass(frozen=True)
class DeclaredPlan:
    """The plan of one family. Paths match by their end: "self_attn.q_proj" matches that module of every layer.

    Attributes:
        styles: path of a module or parameter -> tensor-parallel style; None for the model's own plan.
        local: path of a module -> attributes that count heads or features; each is divided by the number of ranks.
        layers: path of the layer list that is split into stages; None for the list that the styles name. Several
            paths, or one with `*` for numbers, name lists that run in this order.
        towers: paths of the layer lists of an encoder and its decoder, or a function that computes them from the model.
        first: placeholders on later stages for modules before the layers, if the module tree does not determine them:
            because they are registered after the layers, or because their names do not say what they return.
        every: modules that all stages need, or a function that computes them from the model.
        last: modules that run after the layers but are registered before them, or a function that computes them from
            the model; see `StageLayout` for children of modules before the layers.
        carried_inputs: inputs of the layers that an earlier layer computes.
        kept_outputs, shared_states, changes_shapes, calls_forward: see `StageLayout`. Paths of kept outputs match by
            their end; a function computes them, or the shared states, from the model.
        optional_layers: configuration field of the text model that names the layers which a batch may skip, see
            `StageLayout`.
        keeps_whole: tells whether a module of the model is not divided, although the plan names parts of it.
        needs: configuration field -> the only value with which the family can be sharded.
        sublayer_lists: paths of the lists of further parts of the same layers.
        layer_outputs: length of the tuple that a layer returns, if its source does not determine it.
        execution: class of the model, or "*" for all others -> the order in which its parts run. It precedes all other
            fields about stages.
        pipelined: whether the family can be split into stages, or a function that computes it from the model. A family
            that cannot has the `execution` of its derived plan, if there is one.
        cut_vocabulary: whether the embedding and the head are sharded over the vocabulary, or a function that computes
            it from the model.
        whole_logits: whether the head's logits are gathered immediately, because the model processes them.
        splits_sequence: whether layers can process slices of a sequence between the regions of the plan
            (`split_gather`): only their attention mixes tokens. For shipped plans see `divides_sequences`, too.
        head_losses: losses of heads that differ from the usual ones for their suffix, see `Policy.head_losses`.
    """

    styles: Mapping[str, str] | None
    local: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layers: str | tuple[str, ...] | None = None
    towers: tuple[str, ...] | Callable[[nn.Module], tuple[str, ...]] = ()
    first: Mapping[str, type[StagePlaceholder]] = field(default_factory=dict)
    every: tuple[str, ...] | Callable[[nn.Module], tuple[str, ...]] = ()
    last: tuple[str, ...] | Callable[[nn.Module], tuple[str, ...]] = ()
    carried_inputs: tuple[str, ...] = ()
    kept_outputs: Mapping[str, int] | Callable[[nn.Module], Mapping[str, int]] = field(default_factory=dict)
    shared_states: States | Callable[[nn.Module], States] = field(default_factory=dict)
    changes_shapes: bool = False
    calls_forward: bool = False
    optional_layers: str | None = None
    keeps_whole: Callable[[nn.Module], bool] | None = None
    needs: Mapping[str, Any] = field(default_factory=dict)
    sublayer_lists: tuple[str, ...] = ()
    layer_outputs: int | None = None
    execution: Mapping[str, ExecutionOrder] = field(default_factory=dict)
    pipelined: bool | Callable[[nn.Module], bool] = True
    cut_vocabulary: bool | Callable[[nn.Module], bool] = True
    whole_logits: bool = False
    splits_sequence: bool = False
    head_losses: HeadLosses = field(default_factory=dict)

    def styles_of(self, model: nn.Module) -> dict[str, str]:
        """Return the style of each path of the model that has one, with `*` for numbers."""
        if self.styles is None:
            return styles_of_transformers(model)
        names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
        found = {pattern: lookup(pattern, self.styles) for pattern in {starred(name) for name in names}}
        return {pattern: style for pattern, style in found.items() if style is not None}

    def local_values(self, path: str, module: nn.Module, tp_size: int) -> dict[str, int]:
        """Return the local values of the attributes of the module at `path` that count heads or features."""
        names = lookup(starred(path), self.local) or ()
        # At least 1: key/value heads fewer than ranks are copied.
        return {name: max(getattr(module, name) // tp_size, 1) for name in names if hasattr(module, name)}

    def uneven_counts(self, model: nn.Module, tp_size: int) -> list[str]:
        """Return a sentence for the first attribute of heads or features that `tp_size` does not divide."""
        counts = {
            join(path, name): value
            for path, module in model.named_modules()
            for name, value in self.local_values(path, module, 1).items()
            if value % tp_size
        }
        return [
            f"tp_size={tp_size} does not divide {path}={count}; use {divisors_phrase(count)}"
            for path, count in list(counts.items())[:1]
        ]

    def check(self, model: nn.Module) -> list[str]:
        """Return a sentence for each configuration field whose value prevents sharding."""
        config, name = getattr(model, "config", None), type(model).__name__
        return [
            f"{name} with {field}={getattr(config, field)!r} cannot be sharded; use {field}={value!r}"
            for field, value in self.needs.items()
            if getattr(config, field, value) != value
        ]

    def cuts_vocabulary_of(self, model: nn.Module) -> bool:
        """Return whether the embedding and the head of the model are sharded over the vocabulary."""
        return _of(model, self.cut_vocabulary)

    def stages_of(self, model: nn.Module) -> StageLayout | None:
        """Return the stage layout of the model; None if it cannot be split."""
        names = (*(each.__name__ for each in type(model).__mro__), "*")
        orders = self.execution
        is_pipelined = _of(model, self.pipelined)
        if not orders and not is_pipelined and (derived := proposed_plan_of(type(model))) is not None:
            orders = derived.execution
        execution = next((orders[name] for name in names if name in orders), None)
        if execution is not None:
            return execution.layout(model)
        if not is_pipelined:
            return None
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        ends = _of(model, self.towers)
        towers = [next((name for name in lists if ends_in(name, end)), None) for end in ends]
        chain = self._chain(lists)
        if towers and None not in towers:
            return self._corrected(tower_layout(model, *towers, lambda path: lookup(path, self.first)), model)
        if len(chain) > 1:
            layout = chain_layout(model, chain)
        else:
            named = next(iter(chain), None)
            path = named or layer_paths(model, self.styles_of(model))
            layout = stage_layout(model, path, runs_once=callable(self.pipelined))  # which has looked
        if layout is None:
            return None
        return self._corrected(layout, model, self.changes_shapes)

    def _chain(self, lists: Sequence[str]) -> list[str]:
        """Return the paths of the layer lists that `layers` names, in the order in which they run."""
        ends = (self.layers,) if isinstance(self.layers, str) else self.layers or ()
        found = [[name for name in lists if ends_in(starred(name) if "*" in end else name, end)] for end in ends]
        # A path without `*` names one list.
        return [name for end, names in zip(ends, found, strict=True) for name in (names if "*" in end else names[:1])]

    def _kept_outputs(self, model: nn.Module, paths: Sequence[str], layout: StageLayout) -> dict[str, int]:
        """Return the kept outputs of the modules that the layout places."""
        table = _of(model, self.kept_outputs)
        placed = (*layout.first, *layout.last, *(path for path in paths if path.rpartition(".")[0] == layout.layers))
        return {path: count for path in placed if (count := lookup(path, table)) is not None}

    def _corrected(self, layout: StageLayout, model: nn.Module, changes_shapes: bool = False) -> StageLayout:
        """Apply the plan's settings for single modules to a layout inferred from the module tree."""
        paths = [name for name, _ in model.named_modules()]
        needed = _of(model, self.every)
        every = tuple(path for path in paths if any(ends_in(path, end) for end in needed))
        named = _of(model, self.last)
        moved = tuple(path for path in layout.first if any(ends_in(path, end) for end in named))
        parts = (path for path in paths if path.rpartition(".")[0] in layout.first)
        with_head = tuple(path for path in parts if any(ends_in(path, end) for end in named))
        sublayer_lists = tuple(next(path for path in paths if ends_in(path, end)) for end in self.sublayer_lists)
        base = getattr(model, "base_model_prefix", None) or "."
        of_head = hasattr(model, base)  # modules outside the base model run after the layers, whatever they are called
        behind = [path for path in layout.last if not of_head or path.startswith(f"{base}.")]
        earlier = {path: found for path in behind if (found := lookup(path, self.first)) is not None}
        first = {
            path: lookup(path, self.first) or placeholder
            for path, placeholder in {**layout.first, **earlier}.items()
            if path not in (*every, *moved, *sublayer_lists)
        }
        last = tuple(path for path in layout.last if path not in (*every, *earlier, *sublayer_lists))
        next_layers = None if layout.next_layers is None else self._corrected(layout.next_layers, model, changes_shapes)
        outputs = layout.tuple_output if self.layer_outputs is None else self.layer_outputs
        skips_encoders = any(placeholder is UnreachablePlaceholder for placeholder in first.values())
        layout = replace(
            layout,
            first=first,
            last=(*last, *moved, *with_head),
            first_inputs=ENCODED_INPUTS if skips_encoders and not changes_shapes else (),
        )
        layer = model.get_submodule(layout.layers)[0]
        return replace(
            layout,
            kept_outputs=self._kept_outputs(model, paths, layout),
            shared_states=_of(model, self.shared_states),
            changes_shapes=changes_shapes,
            calls_forward=self.calls_forward,
            optional_layers=() if self.optional_layers is None else _of_text(model, self.optional_layers),
            every=(*layout.every, *every),
            tuple_output=outputs,
            carried_inputs=_read_by(layer, self.carried_inputs),
            sublayer_lists=sublayer_lists,
            next_layers=next_layers,
        )


def _of(model: nn.Module, found: Value | Callable[[nn.Module], Value]) -> Value:
    """Return a field of a plan, which may be a function of the model."""
    return found(model) if callable(found) else found


def _of_text(model: nn.Module, field: str) -> tuple[int, ...]:
    return tuple(getattr(model.config.get_text_config(), field))


def _read_by(layer: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Return the `names` that are inputs of the layer; a decoder's layers may lack inputs of the encoder's layers."""
    return tuple(name for name in names if name in inspect.signature(layer.forward).parameters)


def ends_in(path: str, end: str) -> bool:
    """Return whether the last names of a path are those of `end`."""
    return path == end or path.endswith(f".{end}")


def lookup(path: str, table: Mapping[str, Value]) -> Value | None:
    """Return the value of the longest key in the table that `path` ends in; None if there is none."""
    ends = [end for end in table if ends_in(path, end)]
    return table[max(ends, key=len)] if ends else None


def tables_of(name: str) -> dict[str, Any]:
    """Return the entries of the tables called `name` of all modules in `plans.tables`, by transformers family."""
    package = importlib.import_module("shardformer.policies.plans.tables")
    files = [info.name for info in pkgutil.iter_modules(package.__path__)]
    modules = [importlib.import_module(f"{package.__name__}.{file}") for file in files]
    return {family: entry for module in modules for family, entry in getattr(module, name, {}).items()}


@cache
def declared_plans() -> dict[str, DeclaredPlan]:
    """Return the plan of each transformers family that has one in this package: the tables `PLANS`."""
    return tables_of("PLANS")


@cache
def declared_head_losses() -> dict[str, HeadLosses]:
    """Return the losses of the heads of each family: of its plan, or of the tables `HEAD_LOSSES` if it has none.

    The heads of a family with a plan in this package compute the usual losses, unless its plan declares others.
    """
    of_plans = {family: {**USUAL_HEAD_LOSSES, **plan.head_losses} for family, plan in declared_plans().items()}
    derived = {family: plan.head_losses for family, plan in proposed_plans().items() if plan.head_losses}
    known = {**tables_of("HEAD_LOSSES"), **of_plans}
    return known | {family: {**losses, **known.get(family, {})} for family, losses in derived.items()}


def declared_plan_of(cls: type) -> DeclaredPlan | None:
    """Return the plan of the family that a transformers model class belongs to; None if it has none."""
    return declared_plans().get(family_of(cls))


@cache
def proposed_plans() -> dict[str, DeclaredPlan]:
    """Return the plans that were derived from the models: the tables `PROPOSED`."""
    return tables_of("PROPOSED")


def proposed_plan_of(cls: type) -> DeclaredPlan | None:
    """Return the derived plan of the family that a transformers model class belongs to; None if it has none."""
    return proposed_plans().get(family_of(cls))


def is_shipped(plan: DeclaredPlan | None) -> bool:
    """Return whether a plan is one of this package, or None, that of transformers; others are the user's own."""
    return plan is None or plan in (*declared_plans().values(), *proposed_plans().values())


@cache
def _seen_to_divide() -> dict[str, frozenset[str]]:
    """Way -> families, and classes of others as family/Class."""
    table = Path(__file__).parent / "tables" / "divided_sequences.json"
    return {way: frozenset(names) for way, names in json.loads(table.read_text(encoding="utf-8")).items()}


def divides_sequences(cls: type, way: str) -> bool:
    """Return whether the class, or its family, was seen to train right where ranks have parts of sequences.

    `python -m zoo_tests.campaigns.divided_sequences --ship` writes the table.

    Args:
        way: `split_gather`, slices between the regions of its plan; `cp`, ranks that share sequences; or `all_to_all`
            and `cp_all_to_all`, parts of sequences inside of its lists of layers that are exchanged for heads.
    """
    family = family_of(cls)
    return not {family, f"{family}/{cls.__name__}"}.isdisjoint(_seen_to_divide()[way])


def declared_head_losses_of(cls: type) -> HeadLosses:
    """Return the declared losses of the heads of the family that a transformers model class belongs to."""
    return declared_head_losses().get(family_of(cls), {})


def family_of(cls: type) -> str | None:
    """Return the transformers family of a class; None for classes of others."""
    found = _FAMILY.match(cls.__module__)
    return found[1] if found else None
