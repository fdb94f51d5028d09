"""One-line constructors of the descriptions, so that a family reads as a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from shardformer.layers import (
    ColumnParallelLinear,
    FusedLayerNorm,
    FusedRMSNorm,
    HeadParallelEmbedding,
    ParallelDropout,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLMHead,
)
from shardformer.policies.base import SubModuleReplacementDescription as Replacement
from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import Part, ShardSpec, annotate, shard_parameter

Change = Callable[[nn.Module], None]


class ShardingRules:
    """The vocabulary of a table for one `ShardConfig`; each method returns descriptions of sub-modules.

    (Those for parameters of a module itself return changes for its `param_replacement`.)

    A suffix that ends in "?" may be missing.
    """

    def __init__(self, shard_config: ShardConfig) -> None:
        self.config = shard_config

    def column(
        self,
        *suffixes: str,
        num_heads: int | None = None,
        part_size: int | None = None,
        reads: str | None = None,
        reads_whole: bool = False,
        gathers_sequence: bool = False,
    ) -> list[Replacement]:
        """Column-parallel linears that read the same input (`reads` names it, to join several calls).

        A fused projection consists of parts of `part_size` features, each with `num_heads` heads. `reads_whole` where
        the input is no slice of the sequence even under sequence parallelism (an encoder's output);
        `gathers_sequence` where the linear itself starts a region.
        """
        is_gathered = self.config.sequence is not None and not reads_whole
        kwargs = {"num_heads": num_heads, "part_size": part_size, "input_is_gathered": is_gathered}
        options = {"reads": reads or suffixes[0], "gathers_sequence": gathers_sequence}
        return [_replace(suffix, ColumnParallelLinear, kwargs, **options) for suffix in suffixes]

    def row(self, suffix: str, num_heads: int | None = None) -> list[Replacement]:
        """A row-parallel linear that ends a tensor-parallel region."""
        return [_replace(suffix, RowParallelLinear, {"num_heads": num_heads, "sequence": self.config.sequence})]

    def gathered(self, *suffixes: str) -> list[Replacement]:
        """Column-parallel linears whose output is put together at once."""
        return [_replace(suffix, ColumnParallelLinear, {"gather_output": True}) for suffix in suffixes]

    def row_split_input(self, suffix: str) -> list[Replacement]:
        """A row-parallel linear whose input is whole on every rank."""
        return [_replace(suffix, RowParallelLinear, {"splits_input": True})]

    def vocab(self, suffix: str) -> list[Replacement]:
        """A token embedding, cut over the vocabulary."""
        return [_replace(suffix, VocabParallelEmbedding, self.config.vocab_options)]

    def head(self, suffix: str) -> list[Replacement]:
        """A language-model head, cut over the vocabulary."""
        return [_replace(suffix, VocabParallelLMHead, self.config.vocab_options)]

    def gathered_lm_head(self, suffix: str) -> list[Replacement]:
        """A language-model head whose logits are gathered at once, where the model does something with them."""
        return [_replace(suffix, ColumnParallelLinear, {**self.config.vocab_options, "gather_output": True})]

    def layer_norm(self, *suffixes: str) -> list[Replacement]:
        """Layer norms inside the stack of layers."""
        return self._norm(FusedLayerNorm, suffixes)

    def rms_norm(self, *suffixes: str) -> list[Replacement]:
        """RMS norms inside the stack of layers."""
        return self._norm(FusedRMSNorm, suffixes)

    def head_norm(self, *suffixes: str) -> list[Replacement]:
        """Norms inside a tensor-parallel region, whose weights all heads share."""
        target = FusedRMSNorm if self.config.enable_fused_normalization else None
        return [_replace(suffix, target, {}, partial_gradient=True) for suffix in suffixes]

    def residual_dropout(self, *suffixes: str) -> list[Replacement]:
        """Dropout between tensor-parallel regions: the same on every rank unless each has tokens of its own."""
        target = ParallelDropout if self.config.sequence is not None else None
        return [_replace(suffix, target, {}) for suffix in suffixes]

    def replicated(self, *suffixes: str) -> list[Replacement]:
        """Sub-modules that every rank computes the same with."""
        return [_replace(suffix, None, {}) for suffix in suffixes]

    def module_parameters(self, *names: str, partial_gradient: bool = False) -> list[Change]:
        """Parameters of the module itself between tensor-parallel regions (layer scales): whole on every rank.

        They may be missing, or be plain numbers. `partial_gradient` for those that a rank uses with its heads only.
        """
        size = self.config.tensor_parallel_size
        rank = dist.get_rank(self.config.group) if size > 1 else 0
        is_partial = size > 1 and (partial_gradient or self.config.sequence is not None)
        group = self.config.group if is_partial else None

        def declare(module: nn.Module) -> None:
            for name in names:
                parameter = getattr(module, name, None)
                if isinstance(parameter, nn.Parameter):
                    annotate(parameter, ShardSpec(tuple(parameter.shape), rank=rank, world_size=size), group)

        return [declare]

    def heads_of_parameter(self, name: str, dim: int) -> list[Change]:
        """A parameter of the module itself with something for each head along `dim`; a rank gets that of its heads."""
        group, size = self.config.group, self.config.tensor_parallel_size

        def share_out(module: nn.Module) -> None:
            parameter = getattr(module, name)
            parts = (Part(parameter.shape[dim]),)
            spec = ShardSpec(tuple(parameter.shape), dim, parts, dist.get_rank(group), size)
            setattr(module, name, shard_parameter(parameter, spec))

        return [share_out] if size > 1 else []

    def region_dropout(self, *suffixes: str) -> list[Replacement]:
        """Dropout inside a tensor-parallel region: each rank has features, or heads, of its own."""
        return [_replace(suffix, ParallelDropout, {}) for suffix in suffixes]

    def head_sharded_embedding(self, suffix: str) -> list[Replacement]:
        """An embedding table [positions, heads] of biases, of which a rank needs its heads' columns."""
        return [_replace(suffix, HeadParallelEmbedding, {})]

    def _norm(self, fused: type, suffixes: tuple[str, ...]) -> list[Replacement]:
        target = fused if self.config.enable_fused_normalization else None
        partial = self.config.sequence is not None
        return [_replace(suffix, target, {}, partial_gradient=partial) for suffix in suffixes]


def _replace(suffix: str, target: type | None, kwargs: dict[str, Any], **options: Any) -> Replacement:
    return Replacement(suffix.rstrip("?"), target, dict(kwargs), ignore_if_not_exist=suffix.endswith("?"), **options)
