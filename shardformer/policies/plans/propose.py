"""Candidates for a model's plan: one for each tensor-parallel region, and those for its vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.distributed.random import random_numbers_apart
from shardformer.policies.plans.plan import Plan
from shardformer.policies.plans.policy import PlanPolicy, asked
from shardformer.policies.plans.regions import Recording, find_regions, local_choices, record, with_own_masks
from shardformer.policies.plans.styles import STYLES
from shardformer.utils.derived_modules import stored_weight
from shardformer.utils.module_paths import starred
from shardformer.utils.source import GETTERS

_FLAGS = ("cut_vocabulary", "whole_logits", "splits_sequence")
_KEYS = ("styles", "local", "stages", *_FLAGS)


class ProposedPolicy(PlanPolicy):
    """Policy of a plan that a user may have edited: the attributes that it divides are checked."""

    checks_counts = True


@dataclass(frozen=True)
class ProposedPlan(Plan):
    """A tensor-parallel plan of a user's, written to a JSON file and read from it; what it does not name is replicated.

    The file has `styles`, `local` and the flags of `Plan`; `stages` are its `execution`. The flags suit a model that
    computes its loss itself.
    """

    styles: Mapping[str, str] = field(default_factory=dict)
    cut_vocabulary: bool = False
    whole_logits: bool = True

    def policy(self) -> PlanPolicy:
        """Return the policy for `HybridParallelPlugin(custom_policy=...)`."""
        return ProposedPolicy(self)

    def joined(self, other: ProposedPlan) -> ProposedPlan:
        """Return the plan with the entries of both; the vocabulary is sharded as `other` says."""
        local = {path: tuple(names) for path, names in self.local.items()}
        for path, names in other.local.items():
            local[path] = tuple(sorted({*local.get(path, ()), *names}))
        styles, stages = {**self.styles, **other.styles}, {**self.execution, **other.execution}
        return replace(other, styles=styles, local=local, execution=stages, splits_sequence=False)

    def to_json(self) -> str:
        """Return the plan as JSON, one entry a line."""
        local = {path: list(names) for path, names in self.local.items()}
        flags = {name: getattr(self, name) for name in _FLAGS}
        stages = {name: order.to_dict() for name, order in self.execution.items()}
        found = {"styles": dict(self.styles), "local": local, **flags} | ({"stages": stages} if stages else {})
        return json.dumps(found, indent=2) + "\n"

    def save(self, file: str | Path) -> None:
        """Write the plan to a JSON file."""
        Path(file).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(file: str | Path) -> ProposedPlan:
        """Read a plan from a JSON file; raises ValueError if it is missing or does not hold a plan."""
        try:
            found = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"{file} holds no plan ({error}); write one with 'booster verify --propose'") from None
        return ProposedPlan.from_dict(found)

    @staticmethod
    def from_dict(found: Any) -> ProposedPlan:
        """Build a plan from the JSON form; raises ValueError that names all unknown keys, styles and values."""
        if not isinstance(found, Mapping) or not isinstance(found.get("styles"), Mapping):
            raise ValueError("a plan is an object with \"styles\"; write one with 'booster verify --propose'")
        problems = [f"'{key}' is no key of a plan; use one of {', '.join(_KEYS)}" for key in found.keys() - set(_KEYS)]
        problems += [
            f"style '{style}' of '{path}' is not known; use one of {', '.join(sorted(STYLES))}"
            for path, style in found["styles"].items()
            if style not in STYLES
        ]
        problems += [
            f"{key}={found[key]!r} is not a truth value; use true or false"
            for key in _FLAGS
            if not isinstance(found.get(key, True), bool)
        ]
        local = found.get("local", {})
        if not isinstance(local, Mapping) or not all(_is_names(names) for names in local.values()):
            problems.append('"local" does not map paths to lists of attributes; use {"attn": ["num_heads"]}')
        stages = found.get("stages", {})
        if not isinstance(stages, Mapping):
            problems.append('"stages" does not map classes to the order of their modules')
        if problems:
            raise ValueError("; ".join(sorted(problems)))
        return ProposedPlan.of_row(found)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


Alternatives = list[ProposedPlan]
_LARGE = 64  # features of a head or rows of an embedding from which on it is worth a collective


def candidates(model: nn.Module, batch: Mapping[str, Any]) -> list[Alternatives]:
    """Return what can be sharded: for each part of the plan alternatives; the first that trains exactly counts.

    Parts are independent of each other, and the whole plan is that of all parts (`ProposedPlan.joined`).

    Args:
        model: the whole model, small enough for one forward pass.
    """
    names = ("attention_mask",)  # a fully padded row has no derivatives
    whole = {name: torch.ones_like(value) if name in names else value for name, value in batch.items()}
    with random_numbers_apart():
        recording = record(model, lambda: model(**whole))
    found_regions = [with_own_masks(model, region) for region in find_regions(model, recording)]
    regions = [region for region in found_regions if region is not None]
    found = [[ProposedPlan(region.styles, local) for local in local_choices(model, region)] for region in regions]
    planned = {path for region in regions for path in region.styles}
    found += [[ProposedPlan({path: style})] for path, style in _single(model, recording).items() if path not in planned]
    return [*found, [ProposedPlan(cut_vocabulary=True, whole_logits=whole) for whole in (False, True)]]


def propose_plan(model: nn.Module, batch: Mapping[str, Any]) -> ProposedPlan:
    """Derive a tensor-parallel plan from one forward pass of a model, the same on every rank.

    The plan is not verified: `booster verify DIR --propose` and `plugins.hybrid_parallel.verify.propose` train a tiny
    model with each part of it, and drop what differs.

    Args:
        model: the whole model, on any device but "meta".
        batch: inputs of its forward, keyed by argument name.

    Returns:
        A plan, whose `policy()` is a `custom_policy` and whose `save` writes editable JSON.
    """
    plan = ProposedPlan()
    for alternatives in candidates(model, batch):
        plan = plan.joined(alternatives[-1] if alternatives[0].cut_vocabulary else alternatives[0])
    return plan


def _single(model: nn.Module, recording: Recording) -> dict[str, str]:
    """Return styles of layers cut by themselves, whole again behind: large heads, embeddings without getter."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    owners: dict[int, int] = {}
    for name in names:
        owners[id(model.get_parameter(name))] = owners.get(id(model.get_parameter(name)), 0) + 1
    styles = {}
    known = {id(module) for getter in GETTERS if (module := asked(model, getter)) is not None}
    for path, module in model.named_modules():
        weight = stored_weight(module)
        if id(module) in known or not isinstance(weight, Tensor) or owners.get(id(weight)) != 1:
            continue
        is_head = path in recording.outputs.sources and starred(path) == path and type(module) is nn.Linear
        if is_head and len(weight) >= _LARGE and f"{path}.weight" not in recording.outputs.parameters:
            styles[path] = "colwise_gather_output"
        elif type(module) is nn.Embedding and not known and module.num_embeddings >= _LARGE:
            styles[starred(path)] = "embedding_rowwise"
    return styles
