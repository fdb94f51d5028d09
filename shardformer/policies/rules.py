"""Rules: how a family's modules are sharded, so that its policy reads as a table.

    table = {
        "{}SelfAttention": [GATHERS, local(HEADS), rules.column("query", "key", "value", num_heads=HEADS)],
        "{}SelfOutput": [rules.row("dense", num_heads=HEADS), rules.layer_norm("LayerNorm")],
    }

Keys are class names of modules, `{}` the prefix of the family's. An entry is a call of the method of `ShardingRules`
with its name, made when the options and the model are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn

from shardformer import layers
from shardformer.distributed.random import draw_per_rank
from shardformer.distributed.sequence_parallel import run_whole
from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.policies.base import ModulePolicyDescription, Origin, Policy, SubModuleReplacementDescription
from shardformer.policies.base import SubModuleReplacementDescription as Replacement
from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import Part, ShardSpec, annotate, shard_parameter

Change = Callable[[nn.Module], None]


class ShardingRules:
    """Constructors of table entries for one `ShardConfig`; each method returns descriptions of sub-modules.

    Methods for parameters of a module itself return changes for its `param_replacement` instead.

    A sub-module whose suffix ends in "?" may be missing.
    """

    def __init__(self, shard_config: ShardConfig) -> None:
        self.config = shard_config

    def column(
        self,
        *suffixes: str,
        num_heads: int | None = None,
        part_size: int | None = None,
        parts: tuple[Part, ...] | None = None,
        reads: str | None = None,
        reads_whole: bool = False,
        gathers_sequence: bool = False,
    ) -> list[Replacement]:
        """Replace linear layers that read the same input by column-parallel ones.

        Args:
            suffixes: paths of the layers.
            num_heads: number of heads in the output, or in each part of a fused projection.
            part_size: number of features of each part of a fused projection.
            parts: the parts of a fused projection, if their sizes differ.
            reads: name of the input, to join several calls.
            reads_whole: whether the input is not sharded even under sequence parallelism (an encoder's output).
            gathers_sequence: whether the layer itself starts a tensor-parallel region.
        """
        is_gathered = self.config.gathers_sum and not reads_whole
        kwargs = {"num_heads": num_heads, "part_size": part_size, "input_is_gathered": is_gathered}
        if parts is not None:
            kwargs = {"parts": parts, "input_is_gathered": is_gathered}
        options = {"reads": reads or suffixes[0], "gathers_sequence": gathers_sequence}
        return [_replace(suffix, layers.ColumnParallelLinear, kwargs, **options) for suffix in suffixes]

    def row(self, suffix: str, num_heads: int | None = None) -> list[Replacement]:
        """Replace a linear layer by a row-parallel one, which ends a tensor-parallel region."""
        return [_replace(suffix, layers.RowParallelLinear, {"num_heads": num_heads, "sequence": self.config.sequence})]

    def gathered(self, *suffixes: str) -> list[Replacement]:
        """Replace linear layers by column-parallel ones that gather their output immediately."""
        return [_replace(suffix, layers.ColumnParallelLinear, {"gather_output": True}) for suffix in suffixes]

    def row_split_input(self, suffix: str) -> list[Replacement]:
        """Replace a linear layer by a row-parallel one whose input is not sharded."""
        return [_replace(suffix, layers.RowParallelLinear, {"splits_input": True})]

    def vocab(self, suffix: str) -> list[Replacement]:
        """Shard a token embedding over the vocabulary."""
        return [_replace(suffix, layers.VocabParallelEmbedding, self.config.vocab_options)]

    def head(self, suffix: str) -> list[Replacement]:
        """Shard a language-model head over the vocabulary."""
        return [_replace(suffix, layers.VocabParallelLMHead, self.config.vocab_options)]

    def gathered_lm_head(self, suffix: str) -> list[Replacement]:
        """Shard a language-model head and gather its logits immediately, for models that process the logits."""
        return [_replace(suffix, layers.GatheredLMHead, {**self.config.vocab_options, "gather_output": True})]

    def layer_norm(self, *suffixes: str) -> list[Replacement]:
        """Describe layer norms inside the stack of layers."""
        return self._norm(layers.FusedLayerNorm, suffixes)

    def rms_norm(self, *suffixes: str) -> list[Replacement]:
        """Describe RMS norms inside the stack of layers."""
        return self._norm(layers.FusedRMSNorm, suffixes)

    def head_norm(self, *suffixes: str) -> list[Replacement]:
        """Describe RMS norms inside a tensor-parallel region whose weights all heads share."""
        target = layers.FusedRMSNorm if self.config.enable_fused_normalization else None
        return [_replace(suffix, target, {}, partial_gradient=True) for suffix in suffixes]

    def residual_dropout(self, *suffixes: str) -> list[Replacement]:
        """Describe dropout between tensor-parallel regions: one mask for all ranks, unless the sequence is sharded."""
        target = layers.ParallelDropout if self.config.sequence is not None else None
        return [_replace(suffix, target, {}) for suffix in suffixes]

    def replicated(self, *suffixes: str) -> list[Replacement]:
        """Declare sub-modules replicated: every rank computes the same with them."""
        return [_replace(suffix, None, {}) for suffix in suffixes]

    def module_parameters(self, *names: str, partial_gradient: bool = False) -> list[Change]:
        """Declare a module's own parameters between tensor-parallel regions (layer scales) replicated.

        Args:
            names: names of the parameters; they may be missing or be plain numbers.
            partial_gradient: whether a rank applies the parameters to its own heads only.
        """
        is_partial = self.config.tensor_parallel_size > 1 and (partial_gradient or self.config.cuts_sequence)
        group = self.config.group if is_partial else None

        def declare(module: nn.Module) -> None:
            for name in names:
                parameter = getattr(module, name, None)
                if isinstance(parameter, nn.Parameter):
                    annotate(parameter, self.config.replicated_spec(parameter), group)

        return [declare]

    def heads_of_parameter(self, name: str, dim: int) -> list[Change]:
        """Shard a module's own parameter along `dim`, which has one entry per attention head.

        Where heads are exchanged for parts of sequences it stays whole, and a rank reads the entries of its heads.
        """
        group, size = self.config.group, self.config.tensor_parallel_size
        if self.config.uses_ulysses:
            return self.module_parameters(name, partial_gradient=True)

        def share_out(module: nn.Module) -> None:
            parameter = getattr(module, name)
            parts = (Part(parameter.shape[dim]),)
            spec = ShardSpec(tuple(parameter.shape), dim, parts, dist.get_rank(group), size)
            setattr(module, name, shard_parameter(parameter, spec))

        return [share_out] if size > 1 else []

    def region_dropout(self, *suffixes: str) -> list[Replacement]:
        """Replace dropout inside a tensor-parallel region, where each rank has its own features or heads."""
        return [_replace(suffix, layers.ParallelDropout, {}) for suffix in suffixes]

    def head_sharded_embedding(self, suffix: str) -> list[Replacement]:
        """Shard an embedding table of biases [positions, heads] by heads."""
        return [_replace(suffix, layers.HeadParallelEmbedding, {})]

    def multi_query(self, suffix: str, **sizes: int) -> list[Replacement]:
        """Replace a fused projection whose key/value heads are fewer than ranks; `sizes` are of `MultiQueryLinear`."""
        return [_replace(suffix, layers.MultiQueryLinear, {**sizes, "input_is_gathered": self.config.gathers_sum})]

    def draw_per_rank(self) -> list[Change]:
        """Let a module with functional dropout draw separate random numbers on each rank, for its own heads."""
        return [self._draw_apart(self.config.tensor_parallel_size > 1 and not self.config.uses_ulysses)]

    def draw_own_slice(self) -> list[Change]:
        """Draw functional dropout between regions per rank, if each rank has its own slice of the sequence."""
        return [self._draw_apart(self.config.sequence is not None)]

    def run_whole(self) -> list[Change]:
        """Let a module see whole sequences between regions."""
        has_regions = self.config.sequence is not None and not self.config.uses_ulysses
        return [partial(run_whole, region=self.config.sequence)] if has_regions else []

    def _draw_apart(self, is_meant: bool) -> Change:
        return lambda module: draw_per_rank(module, self.config.group.rank()) if is_meant else module

    def _norm(self, fused: type, suffixes: tuple[str, ...]) -> list[Replacement]:
        target = fused if self.config.enable_fused_normalization else None
        is_partial = self.config.cuts_sequence
        return [_replace(suffix, target, {}, partial_gradient=is_partial) for suffix in suffixes]


def _replace(suffix: str, target: type | None, kwargs: dict[str, Any], **options: Any) -> Replacement:
    return Replacement(suffix.rstrip("?"), target, dict(kwargs), ignore_if_not_exist=suffix.endswith("?"), **options)


Count = (
    str | int | Callable[[Policy], int]
)  # a number, a field of the model's configuration, or a function of the policy
HEADS = "num_attention_heads"
_COUNTS = ("num_heads", "part_size")  # options that are a `Count`


@dataclass(frozen=True)
class Entry:
    """One entry of a table."""

    # method of `ShardingRules`; "own" for a method of the policy that changes a module, "local" for attributes that a
    # rank has its share of, "gathers" for `gathers_sequence`
    method: str
    names: tuple[str, ...] = ()  # names of sub-modules or parameters, or of the policy's method
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments; of "local", attribute -> `Count`
    when: Callable[[Policy], bool] | None = None  # whether the entry holds for a policy

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
    """Make an entry for attributes of heads or features of a rank's share, by `names`, or by `counts`."""
    return Entry("local", names, counts)


def own(method: str) -> Entry:
    """Make an entry for a method of the policy that changes a module."""
    return Entry("own", (method,))


def projections(query: str, key: str, value: str, num_heads: Count, reads_encoder: bool = False) -> list[Entry]:
    """Make the entries of an attention's projections; keys and values of a cross-attention read the encoder."""
    if not reads_encoder:
        return [rules.column(query, key, value, num_heads=num_heads)]
    return [rules.column(query, num_heads=num_heads), rules.column(key, value, num_heads=num_heads, reads_whole=True)]


class TablePolicy(Policy):
    """Base of families' policies, with the usual losses of their heads unless they set `head_losses`."""

    origin = Origin.FAMILY
    # class name of a module, with `{}` for the prefix -> entries about its parts
    table: ClassVar[Mapping[str, Sequence[Entry]]] = {}
    head_fields: tuple[str, ...] = (HEADS,)  # fields of the configuration that `tp_size` must divide

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
    """Return the policy of a family with the modules and losses of another: only names and `attributes` differ."""
    members = {"__module__": policy.__module__, "__doc__": f"Policy for {prefix}, as {policy.__name__}."}
    members |= {"family": family, "prefix": prefix, "head_losses": policy.head_losses}
    return type(f"{prefix}Policy", (policy,), members | attributes)
