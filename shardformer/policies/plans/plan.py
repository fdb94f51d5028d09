"""Plan: how a family is cut, in the terms of transformers' plans, and the lookup of those of this package.

Completion adds styles for modules that a plan leaves replicated. They are derived from tiny models, and applied only
where the real model has the same classes.

The JSON files of `families` have a row for each family, whose keys are the fields of `Plan`: `declared.json` by hand,
`proposed.json` and `completed.json` derived from tiny models. A row extends those that it is `like`, and names the
functions, placeholders and losses of `families/functions.py`, `stages/stage.py` and `shardformer/loss`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

from torch import nn

from shardformer.layers.linear import out_features
from shardformer.loss import heads, text
from shardformer.loss.heads import LOSSES, USUAL_HEAD_LOSSES, HeadLosses, head_loss_of_kind
from shardformer.matmul.native import is_linear
from shardformer.policies.base import Origin, Policy
from shardformer.policies.feature_counts import HEAD_NORM
from shardformer.policies.plans import stages
from shardformer.policies.plans.styles import fused_parts
from shardformer.stages import stage
from shardformer.stages.placeholders import States
from shardformer.stages.stage import StageLayout, StagePlaceholder, UnreachablePlaceholder
from shardformer.utils.module_paths import divisors_phrase, join, starred

_FAMILIES = Path(__file__).parents[1] / "families"
Value = TypeVar("Value")
_FAMILY = re.compile(r"transformers\.models\.(\w+)\.")


@dataclass(frozen=True)
class Plan:
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
        pipelined: whether the family can be split into stages, or a function that computes it from the model. Classes
            that the derived plan of the family names have the `execution` there.
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
    execution: Mapping[str, stages.ExecutionOrder] = field(default_factory=dict)
    pipelined: bool | Callable[[nn.Module], bool] = True
    cut_vocabulary: bool | Callable[[nn.Module], bool] = True
    whole_logits: bool = False
    splits_sequence: bool = False
    head_losses: HeadLosses = field(default_factory=dict)
    origin: Origin = field(default=Origin.USER, compare=False)

    @classmethod
    def of_row(cls, row: Mapping[str, Any], **changes: Any) -> Self:
        """Return the plan of a row in JSON: `stages` is its `execution`, and `losses` its `head_losses`."""
        renamed = {"stages": "execution", "losses": "head_losses"}
        fields = {renamed.get(name, name): _value(name, value) for name, value in row.items()}
        return cls(**fields | changes)

    def styles_of(self, model: nn.Module) -> dict[str, str]:
        """Return the style of each path of the model that has one, with `*` for numbers."""
        if self.styles is None:
            return dict(model.tp_plan or {})
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

    def cuts_vocabulary_of(self, model: nn.Module) -> bool:
        """Return whether the embedding and the head of the model are sharded over the vocabulary."""
        return _of(model, self.cut_vocabulary)

    def stages_of(self, model: nn.Module) -> StageLayout | None:
        """Return the stage layout of the model; None if it cannot be split."""
        names = (*(each.__name__ for each in type(model).__mro__), "*")
        orders = self.execution
        if not orders and (derived := proposed_plan(family_of(type(model)))) is not None:
            orders = derived.execution
        execution = next((orders[name] for name in names if name in orders), None)
        if execution is not None:
            return execution.layout(model)
        if not _of(model, self.pipelined):
            return None
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        ends = _of(model, self.towers)
        towers = [next((name for name in lists if ends_in(name, end)), None) for end in ends]
        chain = self._chain(lists)
        if towers and None not in towers:
            return self._corrected(stages.tower_layout(model, *towers, lambda path: lookup(path, self.first)), model)
        if len(chain) > 1:
            layout = stages.chain_layout(model, chain)
        else:
            named = next(iter(chain), None)
            path = named or stages.layer_paths(model, self.styles_of(model))
            layout = stages.stage_layout(model, path, runs_once=callable(self.pipelined))  # which has looked
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
            first_inputs=stages.ENCODED_INPUTS if skips_encoders and not changes_shapes else (),
        )
        layer = model.get_submodule(layout.layers)[0]
        return replace(
            layout,
            kept_outputs=self._kept_outputs(model, paths, layout),
            shared_states=_of(model, self.shared_states),
            changes_shapes=changes_shapes,
            calls_forward=self.calls_forward,
            optional_layers=()
            if self.optional_layers is None
            else tuple(getattr(model.config.get_text_config(), self.optional_layers)),
            every=(*layout.every, *every),
            tuple_output=outputs,
            carried_inputs=_read_by(layer, self.carried_inputs),
            sublayer_lists=sublayer_lists,
            next_layers=next_layers,
        )


def _of(model: nn.Module, found: Value | Callable[[nn.Module], Value]) -> Value:
    """Return a field of a plan, which may be a function of the model."""
    return found(model) if callable(found) else found


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


@cache
def _table(file: str) -> dict[str, Any]:
    return json.loads((_FAMILIES / file).read_text(encoding="utf-8"))


def families_in(file: str) -> list[str]:
    """Return the families of a JSON file of `families`; rows that others are like begin with an underscore."""
    return [name for name in _table(file) if not name.startswith("_")]


def row_of(file: str, family: str | None) -> dict[str, Any]:
    """Return a family's row in a JSON file of `families`, with those of the rows that it is `like`; {} without one."""
    own, found = _table(file).get(family, {}), {}
    for row in (*(row_of(file, name) for name in own.get("like", ())), own):
        for name, value in row.items():
            is_more = isinstance(value, dict) and isinstance(found.get(name), dict)
            found[name] = found[name] | value if is_more else value
    return {name: value for name, value in found.items() if name not in ("like", "why")}


def _value(name: str, value: Any) -> Any:
    """Return the value that a field of a row stands for: tuples for lists, and what names stand for."""
    if name == "stages":
        return {each: stages.ExecutionOrder.from_dict(order) for each, order in value.items()}
    if name == "losses":
        return {each: head_loss_of_kind(each, kind) if kind in LOSSES else _named(kind) for each, kind in value.items()}
    if name == "first":
        return {path: _named(placeholder) for path, placeholder in value.items()}
    if isinstance(value, str) and name not in ("layers", "optional_layers"):
        return _named(value)
    if isinstance(value, dict):
        return {path: tuple(each) if isinstance(each, list) else each for path, each in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _named(name: str) -> Any:
    places = (importlib.import_module("shardformer.policies.families.functions"), stage, text, heads)
    return next(getattr(place, name) for place in places if hasattr(place, name))


_BESIDES = ("completed", "usual_losses")  # fields of a row in `declared.json` that no plan has


@cache
def declared_plan(family: str | None) -> Plan | None:
    """Return the plan of a transformers family that is written in this package; None if it has none."""
    row = row_of("declared.json", family)
    if "styles" not in row:
        return None
    origin = Origin.TRANSFORMERS if row["styles"] is None else Origin.DECLARED
    return Plan.of_row({name: value for name, value in row.items() if name not in _BESIDES}, origin=origin)


def declared_plans() -> dict[str, Plan]:
    """Return all plans that are written in this package, by family."""
    found = {family: declared_plan(family) for family in families_in("declared.json")}
    return {family: plan for family, plan in found.items() if plan is not None}


@cache
def proposed_plan(family: str | None) -> Plan | None:
    """Return the plan of a family that was derived from its models and verified; None if it has none.

    A family without styles has nothing that tensor parallelism could cut exactly (convolutions and their batch norms):
    every rank computes all of it. A class without `stages` cannot be split, or not exactly. The forward of a class in
    `losses` computes a loss itself: the usual one of its kind, a mean over its labels, or a sum.
    """
    row = row_of("proposed.json", family)
    return Plan.of_row(row, pipelined=False, origin=Origin.DERIVED) if row else None


def proposed_plans() -> dict[str, Plan]:
    """Return all plans that were derived from models, by family."""
    return {family: proposed_plan(family) for family in families_in("proposed.json")}


def divides_sequences(cls: type, way: str) -> bool:
    """Return whether the class, or its family, was seen to train right where ranks have parts of sequences.

    `python -m zoo_tests.campaigns.divided_sequences --ship` writes the table.

    Args:
        way: `split_gather`, slices between the regions of its plan; `cp`, ranks that share sequences; or `all_to_all`
            and `cp_all_to_all`, parts of sequences inside of its lists of layers that are exchanged for heads.
    """
    family = family_of(cls)
    return not {family, f"{family}/{cls.__name__}"}.isdisjoint(_table("divided_sequences.json")[way])


def declared_head_losses_of(cls: type) -> HeadLosses:
    """Return the declared losses of the heads of the family that a transformers model class belongs to.

    The heads of a family with a plan in this package compute the usual losses, unless its plan declares others.
    """
    family = family_of(cls)
    row, derived = row_of("declared.json", family), proposed_plan(family)
    usual = USUAL_HEAD_LOSSES if "styles" in row or "usual_losses" in row else {}
    return {**({} if derived is None else derived.head_losses), **usual, **_value("losses", row.get("losses", {}))}


def family_of(cls: type) -> str | None:
    """Return the transformers family of a class; None for classes of others."""
    found = _FAMILY.match(cls.__module__)
    return found[1] if found else None


COLUMNS, ROWS = {"colwise", "fused_colwise", "packed_colwise"}, {"rowwise", "packed_rowwise"}
_COPIED = ("k_proj", "v_proj")  # whose heads may be fewer than ranks


@dataclass(frozen=True)
class Completion:
    """Styles of parts of a family that its plan does not name."""

    # parts that are cut in every model of the family; paths match by their end
    declared: Mapping[str, str] = field(default_factory=dict)
    # parts that are cut where their modules are of `classes`, and `tp_size` divides their heads
    derived: Plan = Plan({})
    # path of a module with parts in `derived` -> names of the classes from which they were derived
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def fitting(self, model: nn.Module, policy: Policy) -> Plan:
        """Return the parts that fit a model; columns and rows of one product stay whole together."""
        styles = self.derived.styles_of(model)
        owners: dict[str, list[nn.Module]] = {}
        for path, module in model.named_modules():
            if isinstance(module, StagePlaceholder):
                continue
            owners.setdefault(starred(path), []).append(module)
        unfit = {
            region_of(path, styles)
            for path in styles
            for owner in owners.get(path.rpartition(".")[0], ())
            if not self._fits(path, styles, owner, policy)
        }
        fitting = {path: style for path, style in styles.items() if region_of(path, styles) not in unfit}
        kept = {path.rpartition(".")[0] for path in fitting}
        local = {end: names for end, names in self.derived.local.items() if any(ends_in(path, end) for path in kept)}
        return Plan(fitting | Plan(self.declared).styles_of(model), local)

    def _fits(self, path: str, styles: Mapping[str, str], owner: nn.Module, policy: Policy) -> bool:
        at, _, name = path.rpartition(".")
        if type(owner).__name__ not in (lookup(at, self.classes) or ()):
            return False
        own = {join(at, each) for each, parameter in owner._parameters.items() if parameter is not None}
        if path in own and not own <= styles.keys() and not any(True for _ in owner.children()):
            return False  # a convolution with a bias, whose kernels alone were seen
        if norms_all_heads(owner):
            return False
        counts = self.derived.local_values(at, owner, 1).values()
        is_even = not any(count % policy.tp_size for count in counts)
        # Keys whose channels are convolved behind their projection are divided, and cannot be copied.
        is_convolved = any(each.startswith(f"{at}.") and styles[each] == "first_dim" for each in styles)
        return is_even and _has_whole_heads(owner, name, styles[path], policy, () if is_convolved else _COPIED)


@cache
def completion(family: str | None) -> Completion | None:
    """Return what the family's plan leaves whole, or None; `campaigns.proposed_plans` derives it."""
    declared, row = row_of("declared.json", family).get("completed", {}), dict(row_of("completed.json", family))
    if not declared and not row:
        return None
    classes = row.pop("classes", {})
    return Completion(declared, Plan.of_row({"styles": {}} | row), classes)


def completions() -> dict[str, Completion]:
    """Return all completions, by family."""
    families = sorted({*families_in("completed.json"), *families_in("declared.json")})
    return {family: found for family in families if (found := completion(family)) is not None}


def completion_of(cls: type) -> Completion | None:
    """Return what the plan of a transformers model class, or of its bases, leaves whole."""
    families = sorted({family_of(each) for each in cls.__mro__} - {None})
    return next((found for family in families if (found := completion(family)) is not None), None)


def region_of(path: str, styles: Mapping[str, str]) -> str:
    """Return the path of the smallest module around a part that has columns and rows behind them, or of the part.

    What is no column or row itself, such as a norm of heads, belongs to a module of its layer, not to the layer.
    """
    at, owner = path, path.rpartition(".")[0]
    while at:
        inside = {style for each, style in styles.items() if each.startswith(f"{at}.")}
        if inside & COLUMNS and inside & ROWS:
            return at
        at = at.rpartition(".")[0]
        if at.endswith("*") and at != owner and styles[path] not in COLUMNS | ROWS:
            break
    return path


def norms_all_heads(owner: nn.Module) -> bool:
    """Return whether an attention has norms over the features of all heads, as InternVL's with `use_qk_norm`."""
    norms = [part for name, part in owner.named_children() if HEAD_NORM.fullmatch(name)]
    sizes = {parameter.numel() for norm in norms for parameter in norm.parameters() if parameter.dim() == 1}
    return isinstance(getattr(owner, "head_dim", None), int) and bool(sizes - {owner.head_dim})


def _has_whole_heads(owner: nn.Module, name: str, style: str, policy: Policy, may_be_copied: Sequence[str]) -> bool:
    """Return whether each rank gets whole heads of a projection; true for what is not one to attention heads."""
    module = getattr(owner, name, None)
    if style not in COLUMNS or not isinstance(module, nn.Module) or not is_linear(module):
        return True
    if style == "fused_colwise":
        parts = fused_parts(policy, owner, name)
        return all(part.unit == 1 or part.size // part.unit % policy.tp_size == 0 for part in parts)
    features = out_features(module) // (2 if style == "packed_colwise" else 1)
    heads, head_dim = policy.heads_of(owner, name, features), getattr(owner, "head_dim", None)
    if heads is None:
        return True
    if isinstance(head_dim, int) and features % head_dim == 0:
        heads = features // head_dim
    is_copied = style == "colwise" and name in may_be_copied and policy.tp_size % heads == 0
    return heads % policy.tp_size == 0 or is_copied
