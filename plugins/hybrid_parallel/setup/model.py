"""Steps of `configure` that build the sharded model; `optimizer.py` has the steps for its optimizers.

Values that the model was given are made equal on all ranks, since a head that was initialized without a seed differs.
They are cast, or deferred until ZeRO stage 3 shards them: one parameter at a time, so that the tensor- and
pipeline-parallel part of a rank is never whole in its memory.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.boosted.model_api import WholeModel
from plugins.hybrid_parallel.config.groups import PrecisionOptions
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.agreement import checksum
from plugins.hybrid_parallel.distributed.mesh import DP_CP, EP, HybridMesh, replicate_axis, tied_group
from plugins.hybrid_parallel.features.feature import Feature, Parts, features_of, tensor_group_of_job
from plugins.hybrid_parallel.loss.arithmetic import DynamicLossScale, LossScale
from plugins.hybrid_parallel.pipeline.runtime import PipelineRuntime
from plugins.hybrid_parallel.setup.input_checks import as_configuration_error, cuts_batch, has_batch_norms
from plugins.hybrid_parallel.zero.bucket_layout import Source, TiedParameter, take_source, without_values
from plugins.hybrid_parallel.zero.reducer import hooked_names
from plugins.hybrid_parallel.zero.stage3 import is_sharded
from shardformer import PipelineStageManager, ShardConfig, ShardFormer, lazy
from shardformer.attention.backend import AMPERE, capability_of
from shardformer.distributed.blocks import blocks_of
from shardformer.distributed.process_groups import all_gather_json, world_group
from shardformer.distributed.random import SharedStream
from shardformer.layers.parallel_module import defer_partial_sums
from shardformer.lazy import RecordedValues, WeightReader
from shardformer.loss.perception import keep_losses_of_masks
from shardformer.loss.terms import count_own_boxes
from shardformer.matmul.quantised import is_quantised, stored_tensors
from shardformer.peft import model_inside
from shardformer.policies.user_policy import TPInfoPolicy
from shardformer.shard_spec import EXPERTS, TENSOR, annotate, grad_group_of, parameter_like, spec_of
from shardformer.shardformer import as_policy
from shardformer.transforms.context_parallel import separate_documents
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
    count_own_boxes(model_inside(model))
    keep_losses_of_masks(model_inside(model))
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
        separate_documents(model_inside(model))
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


def share_initial_weights(model: nn.Module) -> None:
    """Compare the whole model over all ranks; if weights differ, take rank 0's on all ranks, as torch's DDP does.

    Shards of differently initialised models would fit together without an error, into a model that no rank built.

    Raises:
        ConfigurationError: if the ranks built models with different names or shapes, froze different parameters, or
            have different hooks on gradients.
    """
    if dist.get_world_size() == 1:
        return
    named = list(stored_tensors(model))
    structure = zlib.crc32(repr([(name, tuple(tensor.shape), tensor.is_meta) for name, tensor in named]).encode())
    tensors = {name: tensor for name, tensor in named if not tensor.is_meta}
    values = zlib.crc32(repr([checksum(tensor) for tensor in tensors.values()]).encode())
    hooks = zlib.crc32(repr(hooked_names(model)).encode())
    frozen = zlib.crc32(repr(_frozen_names(model)).encode())
    same_structure, same_values, same_hooks, same_frozen = _same_everywhere(structure, values, hooks, frozen)
    if not same_structure:
        raise ConfigurationError(
            f"the ranks built different models (rank {dist.get_rank()}: a {type(model).__name__} of {len(named)} "
            "tensors); build the same model from the same configuration on every rank"
        )
    if not same_frozen:
        raise ConfigurationError(_difference(all_gather_json(_frozen_names(model))))
    if not same_hooks:
        raise ConfigurationError(
            f"the ranks have hooks on the gradients of different parameters (rank {dist.get_rank()}: of "
            f"{hooked_names(model)[:3]}); register the same hooks on every rank"
        )
    if same_values:
        return
    if dist.get_rank() == 0:
        _logger.warning(
            "the ranks built different initial weights; all take those of rank 0 (use the same seed on all ranks)"
        )
    for tensor in tensors.values():
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, src=0, group=world_group())
        tensor.detach().copy_(whole)


def _frozen_names(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def _difference(frozen: Sequence[Sequence[str]]) -> str:
    """Describe where the frozen parameters differ, from their names by rank, which are not all equal."""
    rank = next(rank for rank, names in enumerate(frozen) if names != frozen[0])
    name = next(name for name in [*frozen[0], *frozen[rank]] if (name in frozen[0]) != (name in frozen[rank]))
    here, there = (0, rank) if name in frozen[0] else (rank, 0)
    return (
        f"{name} is frozen on rank {here}, and trained on rank {there}; set requires_grad the same way on all "
        "ranks before boost()"
    )


def _same_everywhere(*numbers: int) -> list[bool]:
    extremes = torch.tensor([*numbers, *(-number for number in numbers)])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=world_group())
    largest, smallest = extremes.chunk(2)
    return (largest == -smallest).tolist()


def reader_of(model: nn.Module, seed: int) -> WeightReader | None:
    """Return the reader of weights for a model without values; fill its buffers now, whole as policies expect."""
    reader = lazy.weight_reader_of(model)
    if reader is None and lazy.is_recorded(model):
        shared_seed = torch.tensor(seed)
        # Shards drawn from other seeds would fit together without an error.
        dist.broadcast(shared_seed, src=0, group=world_group())
        with as_configuration_error():
            reader = RecordedValues(model, int(shared_seed))
            reader.fill_buffers(model)
    return reader


def fill(
    model: nn.Module, reader: WeightReader | None, config: HybridParallelConfig, mesh: HybridMesh, trains: bool
) -> dict[nn.Parameter, Source]:
    """Give values to a shard without; return the waiting parameters; `trains`: makes master weights."""
    held = {}
    if trains and config.zero.zero_stage == 3:
        held = defer_values(model, reader, config, mesh, config.mixed_precision.dtype)
    if lazy.waits_for_values(model):
        _cast_ahead(model, config.mixed_precision, trains)
        with as_configuration_error():
            lazy.materialize(model, reader)
    return held


def _cast_ahead(model: nn.Module, options: PrecisionOptions, trains: bool) -> None:
    """Cast parameters without values that need no master weights: each is then rounded as soon as it has values."""
    dtype, keeps_masters = options.dtype, trains and options.master_weights
    for param in model.parameters() if dtype is not None else ():
        if param.is_meta and param.is_floating_point() and not (keeps_masters and param.requires_grad):
            param.data = param.data.to(dtype)


def cast(model: nn.Module, options: PrecisionOptions) -> dict[nn.Parameter, Source]:
    """Cast parameters and return their values before; buffers keep their precision, which rotary tables need."""
    masters: dict[nn.Parameter, Source] = {}
    dtype = options.dtype
    if dtype is None:
        return masters
    for param in model.parameters():
        if param.is_floating_point() and param.dtype != dtype and not is_quantised(param):
            if options.master_weights and param.requires_grad:
                masters[param] = take_source(param, masters)
            param.data = param.data.to(dtype)
    return masters


def shards_by_axis(config: HybridParallelConfig, mesh: HybridMesh) -> Mapping[str, int]:
    """Return the number of ranks that share the states of parameters, by the axis over which these are sharded."""
    sizes = {axis: dist.get_world_size(mesh.group(replicate_axis(axis))) for axis in (TENSOR, EXPERTS)}
    if not config.zero.zero_stage:
        return sizes
    # Experts have fewer replicas.
    num_shards = config.zero.num_shards(mesh.size(DP_CP))
    return {axis: math.gcd(num_shards, size) for axis, size in sizes.items()}


def defer_values(
    model: nn.Module,
    reader: WeightReader | None,
    config: HybridParallelConfig,
    mesh: HybridMesh,
    dtype: torch.dtype | None,
) -> dict[nn.Parameter, Source]:
    """Take the values of all parameters that ranks will keep a shard of, before the model is moved or cast.

    Args:
        model: this rank's part of the model, with values or on the meta device.
        reader: of the values of parameters on the meta device.
        dtype: dtype of the parameters in training; None for the one that they have.

    Returns:
        Parameter -> source of its values, in the dtype of master weights where it has some.
    """
    held: dict[nn.Parameter, Source] = {}
    num_shards = shards_by_axis(config, mesh)
    has_file = config.offload.moves_parameters(mesh.device.type)  # where one rank alone keeps its parameters too
    for name, param in model.named_parameters():
        if not is_sharded(param) or (num_shards[spec_of(param).axis] == 1 and not has_file):
            continue
        has_master = config.mixed_precision.master_weights and param.requires_grad
        kept = param.dtype if dtype is None or has_master else dtype
        empty = without_values(param.shape, dtype or param.dtype, mesh.device)
        if not param.is_meta:
            held[param] = partial(param.data.to, kept)
            param.data = empty
        elif not isinstance(reader, RecordedValues) or reader.knows(name):
            spec, grad_group = spec_of(param), grad_group_of(param)
            held[param] = partial(_read, reader, name, param, kept)
            # In place: other objects (tied names, the pipeline's list of shared parameters) refer to the parameter.
            torch.utils.swap_tensors(param, annotate(parameter_like(param, empty), spec, grad_group))
    return held


def _read(reader: WeightReader, name: str, param: nn.Parameter, dtype: torch.dtype) -> Tensor:
    try:
        return lazy.read_values(reader, name, param).to(dtype)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
