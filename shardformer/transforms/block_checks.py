"""Whether a model's tensor-parallel layers can be computed in blocks (`distributed/blocks.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Protocol

from torch import nn

from shardformer.layers import (
    ColumnParallelLinear,
    FusedLayerNorm,
    FusedRMSNorm,
    GatheredLMHead,
    HeadParallelEmbedding,
    ParallelDropout,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLMHead,
)
from shardformer.layers.linear import in_features, out_features
from shardformer.policies.base import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from shardformer.policies.mixers import MIXER
from shardformer.policies.module_edits import read_norms_of_heads, shard_own_parameter, shard_weights_of_heads
from shardformer.policies.plans.policy import PlanPolicy
from shardformer.shard_config import ShardConfig
from shardformer.transforms.replicated_layers import KeptLayers

_VOCABULARY = (VocabParallelEmbedding, VocabParallelLMHead, GatheredLMHead)
_LAYERS = (
    *_VOCABULARY,
    ColumnParallelLinear,
    RowParallelLinear,
    HeadParallelEmbedding,
    ParallelDropout,
    FusedLayerNorm,
    FusedRMSNorm,
)
_STYLES = frozenset(
    ("colwise", "colwise_gather_output", "colwise_rep", "fused_colwise", "rowwise", "packed_colwise", "packed_rowwise")
    + ("embedding_rowwise", "embedding_colwise", "dropout", "moe_tp_experts", "skips_idle_casts", "local_params")
    + ("replicate", "sequence_parallel", "replicated_with_grad_allreduce")
    + (MIXER,)  # whole in blocks
)


class InBlocks(ShardConfig):
    """Options as if layers were computed in so many blocks."""

    count, computes_in_blocks = 1, True

    @property
    def tensor_parallel_size(self) -> int:
        """Number of parts that each layer is computed in."""
        return self.count


class Sharder(Protocol):
    """The part of `ModelSharder` that is read."""

    model: nn.Module
    policy: Policy
    table: Mapping[str, ModulePolicyDescription]
    kept: KeptLayers

    def described(self) -> Iterator[tuple[str, nn.Module, ModulePolicyDescription]]:
        """Yield the modules that the table describes."""

    def sub_modules(self) -> Iterator[tuple[str, nn.Module, SubModuleReplacementDescription]]:
        """Yield the sub-modules that the table names."""


def block_problems(sharder: Sharder, count: int) -> list[str]:
    """Return the reasons why a whole model cannot be computed in `count` blocks; empty if it can."""
    policy = sharder.policy
    if isinstance(policy, PlanPolicy):
        unknown = [path for path, style in policy.plan.items() if style not in _STYLES]
    else:
        unknown = [name for name, table in sharder.table.items() if table.param_replacement or table.method_replacement]
    layouts = policy.stages.chain if policy.stages is not None else []
    sent = {name for each in layouts for name in (*each.carried_inputs, *each.shared_states)}
    sent -= {name for each in layouts for name in each.head_inputs}
    unknown += [f"layers that pass on {name}" for name in sorted(sent)]
    problems = [f"{type(sharder.model).__name__} has {name}, which a rank computes at once" for name in unknown[:1]]
    problems += [f"{path} is customized and stays whole" for path in sharder.kept.paths]
    return problems + list(_of_layers(sharder, count))


def _of_layers(sharder: Sharder, count: int) -> Iterator[str]:
    for path, native, replacement in sharder.sub_modules():
        target, options = replacement.target_module, replacement.kwargs or {}
        if target is None or target in _VOCABULARY or options.get("divisible_by") or options.get("gather_output"):
            continue
        if target not in _LAYERS or options.get("splits_input"):
            yield f"{path} becomes a {target.__name__}, which a rank computes at once"
        elif target in (ColumnParallelLinear, RowParallelLinear):
            is_row, heads = target is RowParallelLinear, options.get("num_heads")
            features = in_features(native) if is_row else options.get("part_size") or out_features(native)
            parts = {(part.size // part.unit, part.unit > 1) for part in options.get("parts", ())}
            for units, are_heads in sorted(parts) or [(heads or features, heads is not None)]:
                if units % count and (is_row or parts or count % units):
                    yield f"{path} has {units} {'heads' if are_heads else 'features'}, which {count} does not divide"
    for path, module, description in sharder.described():
        for change in description.param_replacement:
            if isinstance(change, partial) and change.func in (read_norms_of_heads, shard_weights_of_heads):
                yield f"{path}.{change.keywords['name']} has a norm for each head, which a rank computes at once"
            elif isinstance(change, partial) and change.func is shard_own_parameter:
                options = change.keywords
                parameter = getattr(module, options["name"])
                size = parameter.shape[max(parameter.dim() - options["from_end"], 0)] // options["num_parts"]
                if size % count:
                    yield f"{path}.{options['name']} has {size} features, which {count} does not divide"
