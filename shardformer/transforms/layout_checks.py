"""Reasons why a layout conflicts with what a model computes across tokens, layers or heads.

Context parallelism inside of layers: parts of sequences between attentions, whole sequences around the layers.

For models whose inputs cannot be sharded as one sequence: encoder-decoders, and models that embed or mask their tokens
in their own way. Attention exchanges parts of sequences for heads (DeepSpeed-Ulysses, arXiv 2309.14509), as
`sequence_parallel/ulysses.py` does between tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from shardformer.attention import uses_registry
from shardformer.distributed.collectives import all_gather, local_slice
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
from shardformer.loss.routers import router_loss_of
from shardformer.policies.base import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from shardformer.policies.mixers import MIXER
from shardformer.policies.module_edits import read_norms_of_heads, shard_own_parameter, shard_weights_of_heads
from shardformer.policies.plans.policy import PlanPolicy
from shardformer.sequence_parallel.split_gather import SEQ_DIM, SequenceParallel
from shardformer.shard_config import ShardConfig
from shardformer.transforms.context_parallel import counting_reasons
from shardformer.transforms.replicated_layers import KeptLayers


def router_problems(model: nn.Module, config: ShardConfig) -> list[str]:
    """Return layouts that conflict with a load-balancing loss, which reads the scores of all layers and tokens."""
    routers = router_loss_of(model)
    adds_up = routers is not None and routers.adds_up
    stages = config.stage_manager.num_stages
    spread = {
        f"pp_size={stages}": stages > 1 and not adds_up,
        "cp_size above 1": config.context is not None and not adds_up,
        "sequence_parallelism_mode='all_to_all'": config.uses_ulysses and not adds_up,
    }
    return [
        f"output_router_logits=True adds a loss over the router scores of all layers and tokens, which {what} "
        "spreads over ranks; use output_router_logits=False, or another layout"
        for what, is_asked in spread.items()
        if is_asked
    ]


def exchange_problems(model: nn.Module, policy: Policy, config: ShardConfig) -> list[str]:
    """Return what keeps `all_to_all` from exchanging heads: it needs attention that uses the registry."""
    mode, name = "sequence_parallelism_mode='all_to_all'", type(model).__name__
    attends = policy.own_attention or any(uses_registry(module) for module in model.modules())
    if not attends or not policy.supports_ulysses:
        return [f"{mode} cannot reach the attention of {name}; use 'split_gather' or no sequence parallelism"]
    if policy.stages is not None and (reason := next(counting_reasons(model, policy), None)) is not None:
        return [
            f"{mode} cannot divide the sequences of {name}, {reason}; use 'split_gather' or no sequence parallelism"
        ]
    size = config.tensor_parallel_size
    kv_heads = getattr(model.config, "num_key_value_heads", None) or size
    if kv_heads % size and size % kv_heads:
        return [f"{mode} with tp_size={size} neither divides num_key_value_heads={kv_heads} nor is a multiple of it"]
    return []


class LayerSequence(SequenceParallel):
    """The parts of sequences that context-parallel ranks have inside of layers.

    What is around the layers is computed on every rank, with a copy of the loss that is divided by the number of ranks.
    So a rank has a summand of each gradient, which are added up with those of the replicas.
    """

    def split(self, x: Tensor) -> Tensor:
        """Split [batch, seq, hidden] -> [batch, seq/cp, hidden]; the gradient of other parts is zero on this rank."""
        return local_slice(x, SEQ_DIM, self.group)

    def _gather_whole(self, x: Tensor) -> Tensor:
        return all_gather(x, SEQ_DIM, self.group, self.length)


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
