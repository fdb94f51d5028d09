"""TablePolicy: the policy of a family as a table, from class names of its modules to entries about their parts.

    table = {
        "{}SelfAttention": [GATHERS, local(HEADS), rules.column("query", "key", "value", num_heads=HEADS)],
        "{}SelfOutput": [rules.row("dense", num_heads=HEADS), rules.layer_norm("LayerNorm")],
    }

`{}` is the prefix of the family's class names. An entry is a call of the method of `ShardingRules` with its name, made
when the options and the model are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.policies.base import ModulePolicyDescription, Origin, Policy, SubModuleReplacementDescription
from shardformer.policies.rules import ShardingRules
from shardformer.shard_config import ShardConfig

Count = (
    str | int | Callable[[Policy], int]
)  # a number, a field of the model's configuration, or a function of the policy
HEADS = "num_attention_heads"
_COUNTS = ("num_heads", "part_size")  # options that are a `Count`


@dataclass(frozen=True)
class Entry:
    """One entry of a table.

    Attributes:
        method: method of `ShardingRules`; "own" for a method of the policy that changes a module, "local" for
            attributes that a rank has its share of, "gathers" for `gathers_sequence`.
        names: names of sub-modules or parameters, or of the policy's method.
        options: further arguments; of "local", attribute -> `Count`.
        when: whether the entry holds for a policy.
    """

    method: str
    names: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    when: Callable[[Policy], bool] | None = None

    def add_to(self, description: ModulePolicyDescription, methods: ShardingRules, policy: Policy) -> None:
        """Add what the entry says about a module to its description."""
        if self.method == "gathers":
            description.gathers_sequence = True
        elif self.method == "own":
            description.param_replacement.append(getattr(policy, *self.names))
        elif self.method == "local":
            counts = dict(zip(self.names, self.names, strict=True)) | self.options
            shares = {name: count_of(policy, count) // policy.tp_size for name, count in counts.items()}
            description.attribute_replacement.update(shares)
        else:
            options = {key: count_of(policy, it) if key in _COUNTS else it for key, it in self.options.items()}
            for change in getattr(methods, self.method)(*self.names, **options):
                is_part = isinstance(change, SubModuleReplacementDescription)
                (description.sub_module_replacement if is_part else description.param_replacement).append(change)


def described(
    entries: Iterable[Entry], policy: Policy, shard_config: ShardConfig | None = None
) -> ModulePolicyDescription:
    """Return what entries say about a module under other options than those of the policy, if given."""
    methods, description = ShardingRules(shard_config or policy.shard_config), ModulePolicyDescription()
    for entry in entries:
        if entry.when is None or entry.when(policy):
            entry.add_to(description, methods, policy)
    return description


def count_of(policy: Policy, count: Count) -> int:
    """Return the value of a `Count`."""
    if isinstance(count, str):
        return getattr(policy.model.config, count)
    return count(policy) if callable(count) else count


class _Rules:
    """`rules.column("query")` is the entry of a call of `ShardingRules.column("query")`."""

    def __getattr__(self, method: str) -> Callable[..., Entry]:
        if not hasattr(ShardingRules, method):
            raise AttributeError(f"ShardingRules has no method '{method}'")

        def make(*names: str, when: Callable[[Policy], bool] | None = None, **options: Any) -> Entry:
            return Entry(method, names, options, when)

        return make


rules = _Rules()
GATHERS = Entry("gathers")


def local(*names: str, **counts: Count) -> Entry:
    """Make an entry for attributes that count heads or features, of which a rank has its share.

    Args:
        names: attributes that are called like fields of the configuration.
        counts: attribute -> what it counts.
    """
    return Entry("local", names, counts)


def own(method: str) -> Entry:
    """Make an entry for a method of the policy that changes a module."""
    return Entry("own", (method,))


class TablePolicy(Policy):
    """Base class of the policies of families.

    A family of this package has the usual losses of its heads unless it sets `head_losses`.

    Attributes:
        table: class name of a module, with `{}` for the prefix -> entries about its parts.
        head_fields: fields of the configuration that `tp_size` must divide.
    """

    origin = Origin.FAMILY
    table: ClassVar[Mapping[str, Sequence[Entry]]] = {}
    head_fields: tuple[str, ...] = (HEADS,)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if vars(cls).get("family") is not None and "head_losses" not in vars(cls):
            cls.head_losses = USUAL_HEAD_LOSSES

    def head_counts(self) -> Mapping[str, int]:
        """Return the head counts in the configuration."""
        return {name: getattr(self.model.config, name) for name in self.head_fields}

    def module_policy(self) -> Mapping[str | type[nn.Module], ModulePolicyDescription]:
        """Return the table for this model and these options."""
        return {name.format(self.prefix): described(entries, self) for name, entries in self.table.items()}


def variant(policy: type[TablePolicy], family: str, prefix: str, **attributes: Any) -> type[TablePolicy]:
    """Return the policy of a family with the modules of another: only names and `attributes` differ."""
    members = {"__module__": policy.__module__, "__doc__": f"Policy for {prefix}, as {policy.__name__}."}
    return type(f"{prefix}Policy", (policy,), {**members, "family": family, "prefix": prefix, **attributes})
