"""Mixer: the rule of one kind of layer, for what styles of single parts do not tell."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from torch import nn

from shardformer.policies.base import ModulePolicyDescription, PartChange
from shardformer.shard_config import ShardConfig
from shardformer.utils.module_paths import join, starred

MIXER = "attention_heads"  # the style of a part that a rule cuts


class HeadCounts(Protocol):
    """The part of the policy of a plan that styles and rules read."""

    model: nn.Module
    shard_config: ShardConfig

    @property
    def plan(self) -> Mapping[str, str]:
        """The style of each path of the model, with `*` for numbers."""

    @property
    def tp_size(self) -> int:
        """Number of ranks that each weight is sharded over."""

    def heads_of(self, owner: nn.Module, name: str, features: int) -> int | None:
        """Return the number of heads of a projection to or from `features`; None if it is not part of attention."""


class Mixer:
    """The rule of one kind of layer. A further one is a file with a derived class, and an entry in `RULES`.

    Attributes:
        fills: whether the rule only fills gaps of transformers' own plans; otherwise it precedes every plan that this
            package or transformers has for a family.
    """

    fills = False

    def parts(self, module: nn.Module) -> Collection[str]:
        """Return the names of the parts of a module that the rule cuts; none if the module is of another kind."""
        return ()

    def styles(self, model: nn.Module, planned: Mapping[str, str]) -> dict[str, str]:
        """Return the styles that the rule adds to those of the family's plan, by path with `*` for numbers."""
        modules = model.named_modules()
        return {starred(join(path, name)): MIXER for path, module in modules for name in self.parts(module)}

    def change(self, policy: HeadCounts, owner: nn.Module, name: str) -> PartChange | str | None:
        """Return how a part of such a module is sharded, or its style; None if every rank has all of it."""
        raise NotImplementedError

    def local_counts(self, owner: nn.Module, config: ShardConfig) -> dict[str, int]:
        """Return a rank's counts of heads and features; empty if it has all, or for a module of another kind."""
        return {}

    def complete(self, policy: HeadCounts, path: str, owner: nn.Module, description: ModulePolicyDescription) -> None:
        """Add to the description of a module of any kind, whose parts are described, what styles do not tell."""
        description.attribute_replacement |= self.local_counts(owner, policy.shard_config)
