"""ProposedPlan: a plan that was derived from a model, as an object, as JSON and as a policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardformer.policies.plans.execution_order import ExecutionOrder
from shardformer.policies.plans.plan import Plan
from shardformer.policies.plans.policy import PlanPolicy
from shardformer.policies.plans.styles import STYLES

_FLAGS = ("cut_vocabulary", "whole_logits", "splits_sequence")
_KEYS = ("styles", "local", "stages", *_FLAGS)


class ProposedPolicy(PlanPolicy):
    """Policy of a plan that a user may have edited: the attributes that it divides are checked."""

    def check(self) -> list[str]:
        """Return why the model cannot be sharded; `tp_size` must divide the attributes that the plan names."""
        return super().check() + self.declared.uneven_counts(self.model, self.tp_size)


@dataclass(frozen=True)
class ProposedPlan:
    """A tensor-parallel plan in the terms of transformers' plans; what it does not name is replicated.

    Attributes:
        styles: end of the path of a module or parameter, with `*` for numbers -> tensor-parallel style.
        local: end of the path of a module -> attributes that are divided by the number of ranks.
        cut_vocabulary: whether the embedding and the head of a transformers model are sharded over the vocabulary.
        whole_logits: whether the head's logits are gathered, for a model that computes its loss itself.
        splits_sequence: whether layers can process slices of a sequence between the regions of the plan.
        stages: class of the model, or "*" for all others -> the order in which its parts run, to split it into stages.
    """

    styles: Mapping[str, str] = field(default_factory=dict)
    local: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cut_vocabulary: bool = False
    whole_logits: bool = True
    splits_sequence: bool = False
    stages: Mapping[str, ExecutionOrder] = field(default_factory=dict)

    def policy(self) -> PlanPolicy:
        """Return the policy for `HybridParallelPlugin(custom_policy=...)`."""
        return ProposedPolicy(
            Plan(
                dict(self.styles),
                dict(self.local),
                cut_vocabulary=self.cut_vocabulary,
                whole_logits=self.whole_logits,
                splits_sequence=self.splits_sequence,
                execution=self.stages,
            )
        )

    def joined(self, other: ProposedPlan) -> ProposedPlan:
        """Return the plan with the entries of both; the vocabulary is sharded as `other` says."""
        local = {path: tuple(names) for path, names in self.local.items()}
        for path, names in other.local.items():
            local[path] = tuple(sorted({*local.get(path, ()), *names}))
        styles, stages = {**self.styles, **other.styles}, {**self.stages, **other.stages}
        return ProposedPlan(styles, local, other.cut_vocabulary, other.whole_logits, stages=stages)

    def to_json(self) -> str:
        """Return the plan as JSON, one entry a line."""
        local = {path: list(names) for path, names in self.local.items()}
        flags = {name: getattr(self, name) for name in _FLAGS}
        stages = {name: order.to_dict() for name, order in self.stages.items()}
        found = {"styles": dict(self.styles), "local": local, **flags} | ({"stages": stages} if stages else {})
        return json.dumps(found, indent=2) + "\n"

    def save(self, file: str | Path) -> None:
        """Write the plan to a JSON file."""
        Path(file).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(file: str | Path) -> ProposedPlan:
        """Read a plan from a JSON file.

        Raises:
            ValueError: the file is missing, is not JSON, or does not hold a plan.
        """
        try:
            found = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"{file} holds no plan ({error}); write one with 'booster verify --propose'") from None
        return ProposedPlan.from_dict(found)

    @staticmethod
    def from_dict(found: Any) -> ProposedPlan:
        """Build a plan from the JSON form.

        Raises:
            ValueError: a key, a style or a value is not that of a plan; the message names all.
        """
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
        orders = {name: ExecutionOrder.from_dict(order) for name, order in stages.items()}
        flags = {name: found[name] for name in _FLAGS if name in found}
        names = {path: tuple(names) for path, names in local.items()}
        return ProposedPlan(dict(found["styles"]), names, **flags, stages=orders)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
