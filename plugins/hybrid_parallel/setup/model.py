"""Steps of `configure` that build the sharded model; `optimizer.py` has the steps for its optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from booster.logging import get_logger
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.boosted.model_api import WholeModel
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.mesh import EP, HybridMesh, tied_group
from plugins.hybrid_parallel.features.feature import Feature, Parts, features_of, tensor_group_of_job
from plugins.hybrid_parallel.loss.arithmetic import DynamicLossScale, LossScale
from plugins.hybrid_parallel.pipeline.runtime import PipelineRuntime
from plugins.hybrid_parallel.setup.initial_weights import cast, fill, reader_of, share_initial_weights
from plugins.hybrid_parallel.setup.input_checks import as_configuration_error, cuts_batch, has_batch_norms
from plugins.hybrid_parallel.zero.bucket_layout import Source, TiedParameter
from shardformer import PipelineStageManager, ShardConfig, ShardFormer
from shardformer.attention.backend import AMPERE, capability_of
from shardformer.distributed.blocks import blocks_of
from shardformer.distributed.random import SharedStream
from shardformer.layers.parallel_module import defer_partial_sums
from shardformer.loss.terms import count_own_targets
from shardformer.peft import model_inside
from shardformer.policies.module_edits import cast_by_use
from shardformer.policies.user_policy import TPInfoPolicy
from shardformer.shardformer import adapt_whole, as_policy
from shardformer.utils.untraced import is_compiler_loaded, prepare_tracing

_logger = get_logger(__name__)


@dataclass(frozen=True)
class BuiltModel:
    """The sharded model, and what its optimizers need to know."""

    model: HybridParallelModel
    parts: Parts
    # sources of the full-precision values of parameters that were cast to a lower precision, and of those that have no
    # values yet
    initial: dict[nn.Parameter, Source]
    loss_scale: LossScale  # the loss scale that all of its optimizers share
    features: Sequence[Feature] = ()


def build_model(
    model: nn.Module,
    config: HybridParallelConfig,
    mesh: HybridMesh,
    seed: int,
    trains: bool,
    features: Sequence[Feature] = (),
) -> BuiltModel:
    """Shard, move and cast the model, in place.

    Args:
        trains: whether the model has an optimizer, which needs master weights.

    Raises:
        ConfigurationError: if the model's family cannot be sharded as asked, with all reasons, or if ranks built
            different models.
    """
    _warn_of_numbers(model, config, mesh)
    reader = reader_of(model, seed)
    share_initial_weights(model)
    origin = WholeModel.of(model)
    for feature in features:
        feature.prepare(model)
    count_own_targets(model_inside(model))
    _cast_routers_by_use(model)
    shared = shard_model(model, config, mesh)
    held = fill(model, reader, config, mesh, trains)
    model.to(mesh.device)
    return wrap_model(model, config, mesh, seed, origin, shared, held, features)


def _warn_of_numbers(model: nn.Module, config: HybridParallelConfig, mesh: HybridMesh) -> None:
    """Log where a GPU only emulates bf16, as in plain PyTorch, and where batch norms see parts of a batch."""
    capability = capability_of(mesh.device)
    if config.mixed_precision.precision == "bf16" and capability is not None and capability < AMPERE:
        _logger.warning(
            "precision='bf16' is emulated, and slow, on a GPU of compute capability %d.%d, which is below 8.0; use "
            "precision='fp16'",
            *capability,
        )
    if cuts_batch(config, mesh.size("dp")) and has_batch_norms(model):
        _logger.warning(
            "%s normalises over its batch: each micro-batch and replica has statistics of its own, so that numbers "
            "differ from those of the whole batch",
            type(model).__name__,
        )


def wrap_model(
    model: nn.Module,
    config: HybridParallelConfig,
    mesh: HybridMesh,
    seed: int,
    origin: WholeModel,
    shared: Sequence[Mapping[int, Tensor]],
    held: Mapping[nn.Parameter, Source] | None = None,
    features: Sequence[Feature] | None = None,
) -> BuiltModel:
    """Cast and wrap a sharded model; `shared`: see `shard_model`; `features`: None for those of `config`."""
    features = features_of(config, model) if features is None else features
    defer_partial_sums(model)  # the buckets sum gradients
    initial = cast(model, config.mixed_precision)
    parts = Parts(model, mesh, seed, _stream(mesh, seed))
    for feature in features:
        feature.sharded(parts)
    runtime, tied = PipelineRuntime(model, mesh, config.schedule, config.chunks_per_rank), _tied(shared, config, mesh)
    wrapped = HybridParallelModel(runtime, origin, tied, parts.stream, config.pipeline, parts.units)
    if is_compiler_loaded():  # a script may compile a function that calls the model
        prepare_tracing()
    for feature in features:
        feature.boosted(wrapped)
    loss_scale = LossScale()
    if config.mixed_precision.precision == "fp16":
        loss_scale = DynamicLossScale(config.mixed_precision.initial_scale, config.mixed_precision.growth_interval)
    return BuiltModel(wrapped, parts, initial | (held or {}), loss_scale, features)


def _tied(
    shared: Sequence[Mapping[int, Tensor]], config: HybridParallelConfig, mesh: HybridMesh
) -> dict[nn.Parameter, TiedParameter]:
    """Return the parameters of this rank that other ranks of the pipeline hold too; all ranks create their groups."""
    tied = {}
    for order, stages in enumerate(shared):
        # In the order of stages; a rank that holds several is listed once.
        holders = list(dict.fromkeys(config.schedule.rank_of(stage, mesh.size("pp")) for stage in sorted(stages)))
        if len(holders) == 1:
            continue
        group = tied_group(mesh, tuple(sorted(holders)))  # on all ranks, including those without the parameter
        if group is not None:
            here = next(stage for stage in stages if config.schedule.rank_of(stage, mesh.size("pp")) == mesh.rank("pp"))
            tied[stages[here]] = TiedParameter(order, group, counted=mesh.rank("pp") == holders[0])
    return tied


def shard_model(model: nn.Module, config: HybridParallelConfig, mesh: HybridMesh) -> list[dict[int, Tensor]]:
    """Shard a model in place; return the parameters of several stages; refuses with all reasons."""
    parallel, sharding = config.parallel, config.policy
    options = config.options()
    group = tensor_group_of_job(model, config, mesh)
    is_whole = parallel.tp_size == parallel.pp_size == parallel.cp_size == 1 and blocks_of(group) is None
    if is_whole and not _changes_layers(options):
        adapt_whole(model_inside(model))
        return []  # nothing to shard: any kind of model works
    stage, *further = config.schedule.stages_of(mesh.rank("pp"), parallel.pp_size, config.chunks_per_rank)
    num_stages = parallel.pp_size * config.chunks_per_rank
    split = config.pipeline.layers_per_stage
    split = None if split is None else tuple(split)
    same = {each.name: options[each.name] for each in fields(ShardConfig) if each.name in options}
    own = {
        "tensor_parallel_process_group": group,
        "pipeline_stage_manager": PipelineStageManager(stage, num_stages, split, tuple(further)),
        "enable_sequence_parallelism": parallel.cuts_over_tp,
        "sequence_parallelism_mode": parallel.sequence_parallelism_mode if parallel.cuts_over_tp else "split_gather",
        "context_parallel_process_group": mesh.group("cp"),
        "context_parallel_mode": parallel.context_mode,
        "expert_parallel_process_group": mesh.group(EP),
        "compute_dtype": config.mixed_precision.dtype,
        "device": mesh.device,
    }
    with as_configuration_error():
        policy = as_policy(sharding.custom_policy) if sharding.tp_info is None else TPInfoPolicy(sharding.tp_info)
        return ShardFormer(ShardConfig(**same | own)).optimize(model, policy)[1]


def _changes_layers(options: Mapping[str, Any]) -> bool:
    """Return whether an option asks for other layers on a single rank too."""
    switches = ("enable_fused_normalization", "enable_flash_attention", "enable_jit_fused", "enable_all_optimization")
    policies = (options["custom_policy"], options["expert_capacity_factor"])
    return options["ep_size"] > 1 or any(each is not None for each in policies) or any(map(options.get, switches))


def _stream(mesh: HybridMesh, seed: int) -> SharedStream | None:
    """Create a stream that tp ranks share and other ranks do not; a single rank keeps torch's own stream (None)."""
    coordinates = [mesh.rank(axis) for axis in ("pp", "dp", "cp")]
    sizes = [mesh.size(axis) for axis in ("pp", "dp", "cp", "tp")]
    if max(sizes) == 1:
        return None
    position = (coordinates[0] * sizes[1] + coordinates[1]) * sizes[2] + coordinates[2]
    return SharedStream(seed + 1_000_003 * (position + 1))


def _cast_routers_by_use(model: nn.Module) -> None:
    """Let routers with a dtype of their own, which cast their classifier in every forward, leave it as it is."""
    for router in list(model.modules()):
        is_own = isinstance(vars(router).get("dtype"), torch.dtype)
        if is_own and type(router._modules.get("classifier")) is nn.Linear:
            cast_by_use(router, "classifier")
