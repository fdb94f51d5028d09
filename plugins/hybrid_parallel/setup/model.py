"""Steps of `configure` that build the sharded model; `optimizer.py` has the steps for its optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.boosted.model import HybridParallelModel, ShardContext
from plugins.hybrid_parallel.boosted.model_api import WholeModel
from plugins.hybrid_parallel.config.compute import PrecisionOptions
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.config.zero import OffloadOptions
from plugins.hybrid_parallel.debug.module_hooks import ModuleWatch
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.distributed.device_mapping import current_device
from plugins.hybrid_parallel.distributed.mesh import EP, HybridMesh, tied_group
from plugins.hybrid_parallel.loss.arithmetic import DynamicLossScale, LossScale
from plugins.hybrid_parallel.loss.expert_balance import ExpertBalance
from plugins.hybrid_parallel.offload.activations import activation_store, check_layers
from plugins.hybrid_parallel.pipeline.runtime import PipelineRuntime
from plugins.hybrid_parallel.pipeline.timeline import ScheduleRecorder
from plugins.hybrid_parallel.reproducible.limits import check_reproducible
from plugins.hybrid_parallel.setup.compilation import check_compilation, compile_layers
from plugins.hybrid_parallel.setup.initial_weights import defer_values, share_initial_weights
from plugins.hybrid_parallel.setup.input_checks import check_contents, cuts_batch, refuse_mixed_samples
from plugins.hybrid_parallel.setup.offload import check_places
from plugins.hybrid_parallel.setup.recomputation import check_recomputation, recompute, recompute_share
from plugins.hybrid_parallel.setup.reproducible import tensor_group, units_of
from plugins.hybrid_parallel.zero.bucket_layout import Source, take_source
from plugins.hybrid_parallel.zero.gradient_hooks import check_hooks
from plugins.hybrid_parallel.zero.granularity import check_granularity, check_step_in_parts, check_zero_size
from plugins.hybrid_parallel.zero.grouping import (
    TiedParameter,
    check_gradients,
    check_memory,
    check_optimizer,
    check_shared_parameters,
    warn_of_untrained,
)
from shardformer import PipelineStageManager, ShardConfig, ShardFormer
from shardformer.attention.kernel_limits import AMPERE, capability_of
from shardformer.distributed.blocks import blocks_of
from shardformer.distributed.process_groups import world_group
from shardformer.distributed.random import SharedStream
from shardformer.expert_parallel.router_bias import keep_biases_from_optimizer
from shardformer.layers.fp8 import check_fp8, multiply_in_fp8
from shardformer.layers.parallel_module import defer_partial_sums
from shardformer.lazy import (
    RecordedValues,
    WeightReader,
    is_recorded,
    materialize,
    waits_for_values,
    weight_reader_of,
)
from shardformer.loss.terms import count_own_boxes
from shardformer.peft import model_inside
from shardformer.policies.user.tp_info import TPInfoPolicy
from shardformer.quantised import is_quantised, keep_format
from shardformer.shardformer import as_policy
from shardformer.transforms.packed_masks import separate_documents
from shardformer.utils.untraced import is_compiler_loaded, prepare_tracing

_logger = get_logger(__name__)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class BuiltModel:
    """The sharded model, and what its optimizers need to know.

    Attributes:
        initial: sources of the full-precision values of parameters that were cast to a lower precision, and of those
            that have no values yet.
        loss_scale: the loss scale that all of its optimizers share.
    """

    model: HybridParallelModel
    initial: dict[nn.Parameter, Source]
    loss_scale: LossScale


def check_options_against_model(
    config: HybridParallelConfig,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    names: Mapping[int, Sequence[str]],
    num_shards: int,
) -> None:
    """Refuse options and optimizers that do not fit this model, before anything is changed.

    Args:
        names: id of each parameter -> its names.
        num_shards: number of ranks over which ZeRO shards the optimizer states.

    Raises:
        ConfigurationError: if one does not fit; the message says why.
    """
    parallel = config.parallel
    num_replicas = parallel.data_parallel_size(dist.get_world_size()) * parallel.cp_size
    check_hooks(model)
    _check_embeddings(config, model, num_replicas)
    refuse_mixed_samples(config, model, num_replicas)
    check_gradients(model)
    with as_configuration_error():
        check_contents(model, config)
    for optim in optimizers:
        check_optimizer(optim, names)
        check_granularity(optim, parallel.tp_size, parallel.ep_size, parallel.pp_size, num_shards)
        check_step_in_parts(optim, config.offload.offload_optimizer)
        check_zero_size(optim, config.zero.zero_size, num_replicas, parallel.tp_size * parallel.ep_size)
    check_shared_parameters(optimizers, names)
    check_memory(optimizers, model)
    warn_of_untrained(optimizers, model.named_parameters())
    check_recomputation(config.kernels.gradient_checkpointing, model)
    check_layers(config.offload.offload_activations, model)
    if config.debugging.reproducible:
        check_reproducible(model, optimizers, num_replicas, current_device(), config.mixed_precision.precision)
    if config.offload != OffloadOptions():
        raise_on_all_ranks(lambda: check_places(optimizers, config, current_device().type))
    if config.kernels.compile_layers:
        check_compilation(model, current_device())
    if (names := waits_for_values(model)) and weight_reader_of(model) is None and not is_recorded(model):
        raise ConfigurationError(
            f"{names[0]} of the {type(model).__name__} is on the meta device, without values; build the model on a "
            "device, or in shardformer.record_module_init()"
        )


def _check_embeddings(config: HybridParallelConfig, model: nn.Module, replicas: int) -> None:
    """Refuse options of embeddings that depend on all ids of a batch, or change weights in the forward pass."""
    for path, module in model.named_modules():
        if not isinstance(module, nn.Embedding):
            continue
        if module.sparse:
            raise ConfigurationError(f"{path} has sparse=True, whose gradients cannot be reduced; use sparse=False")
        if module.scale_grad_by_freq and cuts_batch(config, replicas):
            raise ConfigurationError(
                f"{path} has scale_grad_by_freq=True, which counts the ids of a whole batch; use one replica and "
                "num_microbatches=1 (tp_size takes the ranks), or scale_grad_by_freq=False"
            )
        if module.max_norm is not None and (replicas > 1 or config.mixed_precision.precision != "fp32"):
            raise ConfigurationError(
                f"{path} has max_norm={module.max_norm}, which changes weights where a replica looks them up; use one "
                "replica in fp32 (tp_size or pp_size takes the ranks), or max_norm=None"
            )


def build_model(
    model: nn.Module, config: HybridParallelConfig, mesh: HybridMesh, seed: int, trains: bool
) -> BuiltModel:
    """Shard, move and cast the model, in place.

    Args:
        seed: seed of the random numbers.
        trains: whether the model has an optimizer, which needs master weights.

    Raises:
        ConfigurationError: if the model's family cannot be sharded as asked, with all reasons, or if ranks built
            different models.
    """
    if config.mixed_precision.precision != "fp32":
        raise_on_all_ranks(lambda: _check_precision(mesh.device, config.mixed_precision))
    store = None
    if (place := config.offload.offload_activations) is not None:
        store = raise_on_all_ranks(lambda: activation_store(place, mesh.device))
    if cuts_batch(config, mesh.size("dp")) and any(isinstance(each, _BatchNorm) for each in model.modules()):
        _logger.warning(
            "%s normalises over its batch: each micro-batch and replica has statistics of its own, so that numbers "
            "differ from those of the whole batch",
            type(model).__name__,
        )
    reader = _reader_of(model, seed)
    share_initial_weights(model)
    origin = WholeModel.of(model)
    if config.policy.moe_router_bias_update_rate:
        keep_biases_from_optimizer(model_inside(model))
    recompute(config.kernels.gradient_checkpointing, model)
    count_own_boxes(model_inside(model))
    shared = shard_model(model, config, mesh)
    held = {}
    if trains and config.zero.zero_stage == 3:
        held = defer_values(model, reader, config, mesh, DTYPES.get(config.mixed_precision.precision))
    if waits_for_values(model):
        _cast_ahead(model, config, trains)
        with as_configuration_error():
            materialize(model, reader)
    if isinstance(config.kernels.gradient_checkpointing, float):
        recompute_share(model, config.kernels.gradient_checkpointing)
    keep_format(model)
    model.to(mesh.device)
    built = wrap_model(model, config, mesh, seed, origin, shared, held)
    if store is not None:
        built.model.offload_activations(store)
    return built


def _check_precision(device: torch.device, options: PrecisionOptions) -> None:
    """Refuse FP8 on a GPU without it; log where a GPU only emulates bf16, as in plain PyTorch."""
    precision = options.precision
    if precision == "fp8":
        with as_configuration_error():
            check_fp8(device, options.fp8_recipe)
    capability = capability_of(device)
    if precision == "bf16" and capability is not None and capability < AMPERE:
        _logger.warning(
            "precision='bf16' is emulated, and slow, on a GPU of compute capability %d.%d, which is below 8.0; use "
            "precision='fp16'",
            *capability,
        )


def wrap_model(
    model: nn.Module,
    config: HybridParallelConfig,
    mesh: HybridMesh,
    seed: int,
    origin: WholeModel,
    shared: Sequence[Mapping[int, Tensor]],
    held: Mapping[nn.Parameter, Source] | None = None,
) -> BuiltModel:
    """Cast and wrap a sharded model.

    Args:
        origin: description of the whole model.
        shared: the parameters that several stages hold, see `shard_model`.
        held: the parameters without values, see `defer_values`.
    """
    defer_partial_sums(model)  # the buckets sum gradients
    initial = _cast(model, DTYPES.get(config.mixed_precision.precision), config.mixed_precision.master_weights)
    units = units_of(config.debugging, mesh, seed)
    stream = _stream(mesh, seed) if units is None else units.stream
    context = ShardContext(origin, _tied(shared, config, mesh), stream, config.pipeline, units)
    if config.mixed_precision.precision == "fp8":
        multiply_in_fp8(model, config.mixed_precision.fp8_recipe)
    recorder = None
    if config.debugging.record_schedule is not None:
        # A directory that cannot be written raises an error on all ranks.
        directory = Path(config.debugging.record_schedule)
        recorder = raise_on_all_ranks(lambda: ScheduleRecorder(directory, mesh))
    runtime = PipelineRuntime(model, mesh, config.schedule, config.chunks_per_rank, recorder)
    if config.kernels.compile_layers:
        compile_layers(model)
    elif is_compiler_loaded():  # a script may compile a function that calls the model
        prepare_tracing()
    # Watched before any optimizer, because its hooks take the gradients away.
    wrapped = HybridParallelModel(runtime, context, ModuleWatch(model) if config.debugging.debug else None)
    if config.policy.counts_experts:
        wrapped.expert_balance = ExpertBalance(wrapped.losses, mesh, config.policy.moe_router_bias_update_rate)
        wrapped.around_passes.append(wrapped.expert_balance.around_pass)
    loss_scale = LossScale()
    if config.mixed_precision.precision == "fp16":
        loss_scale = DynamicLossScale(config.mixed_precision.initial_scale, config.mixed_precision.growth_interval)
    return BuiltModel(wrapped, initial | (held or {}), loss_scale)


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


def _reader_of(model: nn.Module, seed: int) -> WeightReader | None:
    """Return the reader of weights for a model without values; fill its buffers now, whole as policies expect."""
    reader = weight_reader_of(model)
    if reader is None and is_recorded(model):
        shared_seed = torch.tensor(seed)
        # Shards drawn from other seeds would fit together without an error.
        dist.broadcast(shared_seed, src=0, group=world_group())
        with as_configuration_error():
            reader = RecordedValues(model, int(shared_seed))
            reader.fill_buffers(model)
    return reader


@contextmanager
def as_configuration_error() -> Iterator[None]:
    """Turn errors of shardformer into ConfigurationError: they are mistakes of the user."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ConfigurationError(str(error)) from error


def shard_model(model: nn.Module, config: HybridParallelConfig, mesh: HybridMesh) -> list[dict[int, Tensor]]:
    """Shard a model in place; return the parameters that several stages hold.

    Raises:
        ConfigurationError: if the model cannot be sharded as asked, with all reasons.
    """
    parallel, kernels, sharding = config.parallel, config.kernels, config.policy
    changes_layers = (
        kernels.enable_fused_normalization,
        kernels.enable_flash_attention,
        kernels.enable_jit_fused,
        kernels.enable_all_optimization,
    )
    dispatches_experts = parallel.ep_size > 1 or sharding.expert_capacity_factor is not None
    group = tensor_group(model, config, mesh)
    is_whole = parallel.tp_size == parallel.pp_size == parallel.cp_size == 1 and blocks_of(group) is None
    if is_whole and not dispatches_experts and sharding.custom_policy is None and not any(changes_layers):
        separate_documents(model_inside(model))
        return []  # nothing to shard: any kind of model works
    stage, *further = config.schedule.stages_of(mesh.rank("pp"), parallel.pp_size, config.chunks_per_rank)
    num_stages = parallel.pp_size * config.chunks_per_rank
    split = config.pipeline.layers_per_stage
    split = None if split is None else tuple(split)
    with as_configuration_error():
        shard_config = ShardConfig(
            tensor_parallel_process_group=group,
            pipeline_stage_manager=PipelineStageManager(stage, num_stages, split, tuple(further)),
            enable_fused_normalization=kernels.enable_fused_normalization,
            enable_flash_attention=kernels.enable_flash_attention,
            enable_jit_fused=kernels.enable_jit_fused,
            enable_sequence_parallelism=parallel.cuts_over_tp,
            sequence_parallelism_mode=parallel.sequence_parallelism_mode if parallel.cuts_over_tp else "split_gather",
            context_parallel_process_group=mesh.group("cp"),
            context_parallel_mode=parallel.context_mode,
            enable_sequence_overlap=kernels.enable_sequence_overlap,
            enable_all_optimization=kernels.enable_all_optimization,
            make_vocab_size_divisible_by=sharding.make_vocab_size_divisible_by,
            compute_dtype=DTYPES.get(config.mixed_precision.precision),
            sharding_dim=sharding.sharding_dim,
            expert_parallel_process_group=mesh.group(EP),
            expert_capacity_factor=sharding.expert_capacity_factor,
            device=mesh.device,
        )
        policy = as_policy(sharding.custom_policy) if sharding.tp_info is None else TPInfoPolicy(sharding.tp_info)
        return ShardFormer(shard_config).optimize(model, policy)[1]


def _cast(model: nn.Module, dtype: torch.dtype | None, keeps_masters: bool) -> dict[nn.Parameter, Source]:
    """Cast parameters and return their values before; buffers keep their precision, which rotary tables need."""
    masters: dict[nn.Parameter, Source] = {}
    if dtype is None:
        return masters
    for param in model.parameters():
        if param.is_floating_point() and param.dtype != dtype and not is_quantised(param):
            if keeps_masters and param.requires_grad:
                masters[param] = take_source(param, masters)
            param.data = param.data.to(dtype)
    return masters


def _cast_ahead(model: nn.Module, config: HybridParallelConfig, trains: bool) -> None:
    """Cast parameters without values that need no master weights: each is then rounded as soon as it has values."""
    dtype = DTYPES.get(config.mixed_precision.precision)
    keeps_masters = trains and config.mixed_precision.master_weights
    for param in model.parameters() if dtype is not None else ():
        if param.is_meta and param.is_floating_point() and not (keeps_masters and param.requires_grad):
            param.data = param.data.to(dtype)


def _stream(mesh: HybridMesh, seed: int) -> SharedStream | None:
    """Create a stream that tp ranks share and other ranks do not; a single rank keeps torch's own stream (None)."""
    coordinates = [mesh.rank(axis) for axis in ("pp", "dp", "cp")]
    sizes = [mesh.size(axis) for axis in ("pp", "dp", "cp", "tp")]
    if max(sizes) == 1:
        return None
    position = (coordinates[0] * sizes[1] + coordinates[1]) * sizes[2] + coordinates[2]
    return SharedStream(seed + 1_000_003 * (position + 1))
