"""The steps of `configure`: from a user's model and optimizers to sharded ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.checkpoint.agree import together
from plugins.hybrid_parallel.config import HybridParallelConfig
from plugins.hybrid_parallel.debug.watch import ModuleWatch
from plugins.hybrid_parallel.initial_weights import share_initial_weights
from plugins.hybrid_parallel.loss_scale import DynamicLossScale, LossScale
from plugins.hybrid_parallel.mesh import EXPERT_RANKS, REPLICAS, HybridMesh, replicas_of, tied_group
from plugins.hybrid_parallel.model import HybridParallelModel, WholeModel
from plugins.hybrid_parallel.pipeline.record import ScheduleRecorder
from plugins.hybrid_parallel.zero.bucket import BucketOptions
from plugins.hybrid_parallel.zero.exchange import Exchange, exchange_of
from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer
from plugins.hybrid_parallel.zero.parameters import (
    TiedParameter,
    build_buckets,
    carry_state,
    check_optimizer,
    is_elementwise,
)
from plugins.hybrid_parallel.zero.reducer import GradientReducer
from shardformer import PipelineStageManager, ShardConfig, ShardFormer
from shardformer.adapters import model_inside
from shardformer.attention import recompute_attention, uses_registry
from shardformer.fp8 import check_fp8, multiply_in_fp8
from shardformer.lazy import (
    RecordedValues,
    WeightReader,
    is_recorded,
    materialize,
    waits_for_values,
    weight_reader_of,
)
from shardformer.losses import balances_experts
from shardformer.policies.tp_info import TPInfoPolicy
from shardformer.rng import SharedStream
from shardformer.shard_model import as_policy
from shardformer.shard_spec import EXPERTS, TENSOR
from shardformer.weight_gradients import own_native_products

_logger = get_logger(__name__)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


@dataclass
class BuiltModel:
    """The sharded model, and what its optimizers have to know.

    Attributes:
        tied: the parameters that other stages hold too.
        masters: full-precision values of the parameters that were cast down.
    """

    model: HybridParallelModel
    tied: dict[nn.Parameter, TiedParameter]
    masters: dict[nn.Parameter, Tensor]


def check_options_against_model(
    config: HybridParallelConfig,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    names: Mapping[int, Sequence[str]],
) -> None:
    """Refuse what does not fit this model, before anything is changed.

    Raises:
        ConfigurationError: see the message.
    """
    for optim in optimizers:
        check_optimizer(optim, names, config.tp_size, config.ep_size)
    if config.gradient_checkpointing and not hasattr(model, "gradient_checkpointing_enable"):
        raise ConfigurationError(
            f"gradient_checkpointing={config.gradient_checkpointing!r} needs a transformers model, not a "
            f"{type(model).__name__}; use gradient_checkpointing=None"
        )
    if (names := waits_for_values(model)) and weight_reader_of(model) is None and not is_recorded(model):
        raise ConfigurationError(
            f"{names[0]} of the {type(model).__name__} is on the meta device, without values; build the model on a "
            "device, or in shardformer.record_module_init()"
        )
    if config.gradient_checkpointing == "selective" and not any(map(uses_registry, model.modules())):
        raise ConfigurationError(
            f"gradient_checkpointing='selective' cannot reach the attention of {type(model).__name__}, which is "
            "written out in its modules; use 'full'"
        )


def build_model(model: nn.Module, config: HybridParallelConfig, mesh: HybridMesh, seed: int) -> BuiltModel:
    """Shard, move and cast the model, in place.

    Raises:
        ConfigurationError: the model's family cannot be sharded as asked, with all reasons; ranks differ in the model.
    """
    if config.gradient_checkpointing == "selective":
        recompute_attention(model)
    elif config.gradient_checkpointing:
        _recompute_layers(model)
    cuts_batch = config.microbatch_size is not None or (config.num_microbatches or config.pp_size) * mesh.size("dp") > 1
    if cuts_batch and any(isinstance(each, _BatchNorm) for each in model.modules()):
        _logger.warning(
            "%s normalises over its batch: each micro-batch and replica has statistics of its own, so that numbers "
            "differ from those of the whole batch",
            type(model).__name__,
        )
    if cuts_batch and balances_experts(model_inside(model)):
        _logger.warning(
            "%s balances its experts over its batch: each micro-batch and replica has a loss of its own for that, and "
            "their mean differs from that of the whole batch",
            type(model).__name__,
        )
    reader = _reader_of(model, seed)
    share_initial_weights(model)
    origin = WholeModel.of(model)
    shared = shard_model(model, config, mesh)
    if waits_for_values(model):
        with _mistakes():
            materialize(model, reader)
    if isinstance(config.gradient_checkpointing, float):
        _recompute_share(model, config.gradient_checkpointing)
    model.to(mesh.device)
    return wrap_model(model, config, mesh, seed, origin, shared)


def wrap_model(
    model: nn.Module,
    config: HybridParallelConfig,
    mesh: HybridMesh,
    seed: int,
    origin: WholeModel,
    shared: Sequence[Mapping[int, Tensor]],
) -> BuiltModel:
    """Cast and wrap a sharded model.

    Args:
        origin: what the whole model was.
        shared: the parameters that several stages hold, see `shard_model`.
    """
    if config.precision == "fp8":
        with _mistakes():
            check_fp8(mesh.device)
    masters = _cast(model, DTYPES.get(config.precision), config.master_weights)
    tied = {}
    for order, stages in enumerate(shared):
        # In the order of stages; a rank that holds several is there once.
        holders = list(dict.fromkeys(config.schedule.rank_of(stage, config.pp_size) for stage in sorted(stages)))
        if len(holders) == 1:
            continue
        group = tied_group(mesh, tuple(sorted(holders)))  # on all ranks, also those without the parameter
        if group is not None:
            here = next(stage for stage in stages if config.schedule.rank_of(stage, config.pp_size) == mesh.rank("pp"))
            tied[stages[here]] = TiedParameter(order, group, counted=mesh.rank("pp") == holders[0])
    elsewhere = [param for param, tie in tied.items() if not tie.counted]
    if config.schedule.splits_backward:
        own_native_products(model)
    if config.precision == "fp8":
        multiply_in_fp8(model)
    wrapped = HybridParallelModel(
        model, mesh, _stream(mesh, seed), origin, elsewhere, config.schedule, config.chunks_per_rank
    )
    wrapped.tied = tied
    if config.record_schedule is not None:
        # A directory that cannot be written is an error on all ranks.
        wrapped.runtime.recorder = together(lambda: ScheduleRecorder(Path(config.record_schedule), mesh))
    if config.debug:
        # Before any optimizer: its hooks take a gradient away.
        watch = wrapped.trace.watch = ModuleWatch(model)
        wrapped.runtime.before_microbatch = watch.begin_microbatch
    return BuiltModel(wrapped, tied, masters)


def _reader_of(model: nn.Module, seed: int) -> WeightReader | None:
    """Where the values of a model without values are; its buffers get theirs now, whole as policies expect them."""
    reader = weight_reader_of(model)
    if reader is None and is_recorded(model):
        shared_seed = torch.tensor(seed)
        dist.broadcast(shared_seed, src=0)  # pieces drawn from other seeds would fit together without an error
        with _mistakes():
            reader = RecordedValues(model, int(shared_seed))
            reader.fill_buffers(model)
    return reader


@contextmanager
def _mistakes() -> Iterator[None]:
    """What shardformer refuses is the user's mistake."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ConfigurationError(str(error)) from error


def _recompute_layers(model: nn.Module) -> None:
    """By transformers' own switch, which newer releases call by another name."""
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def _recompute_share(model: nn.Module, share: float) -> None:
    """Recompute the first `share` of this stage's layers: in a pipeline they wait longest for their backward pass."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigurationError(
            f"gradient_checkpointing={share} finds no layers to choose from in {type(model).__name__}; use 'full'"
        )
    for layer in layers[math.ceil(share * len(layers)) :]:
        layer.gradient_checkpointing = False


def build_optimizer(
    optim: torch.optim.Optimizer,
    groups: Sequence[Sequence[nn.Parameter]],
    names: Mapping[int, Sequence[str]],
    built: BuiltModel,
    config: HybridParallelConfig,
    mesh: HybridMesh,
) -> HybridParallelOptimizer:
    """Re-point an optimizer at the shards of its parameters, by name.

    Args:
        groups: the parameters that its groups held before the model was sharded.
        names: id of each of those -> its names, several where it is tied.
    """
    parameters = dict(built.model.unwrap().named_parameters(remove_duplicate=False))
    local, old = [], {}
    for group in groups:
        held = [(parameters[name], param) for param in group if (name := _held_name(names[id(param)], parameters))]
        old.update(held)
        local.append([param for param, _ in held])
    options = _bucket_options(optim, config, mesh)
    buckets = build_buckets(local, options, built.tied, built.masters)
    carry_state(optim, old, buckets)
    stands_alone = config.pp_size == config.cp_size == config.ep_size == 1
    reducer = GradientReducer(buckets, mesh.group(REPLICAS), config.overlap_communication, waits=stands_alone)
    scale: LossScale = LossScale()
    if config.precision == "fp16":
        scale = DynamicLossScale(config.initial_scale, config.growth_interval)
    if reducer.offers_places:
        own_native_products(built.model.unwrap())
    first_names = {param: name for name, param in reversed(list(parameters.items()))}
    wrapped = HybridParallelOptimizer(
        optim,
        buckets,
        first_names,
        mesh,
        reducer,
        scale,
        config.max_norm,
        config.nonfinite,
        built.model.trace,
        config.overlap_allgather,
    )
    wrapped.aliases = built.model.origin.aliases
    if config.debug:
        wrapped.after_step = partial(built.model.synchrony.run_at, config.synchrony_interval, [wrapped])
    return wrapped


def _bucket_options(
    optim: torch.optim.Optimizer, config: HybridParallelConfig, mesh: HybridMesh
) -> dict[str, BucketOptions]:
    """What buckets have in common of which the parameters are cut over an axis, by its name."""
    groups_of = {axis: mesh.group(replicas_of(axis)) for axis in (TENSOR, EXPERTS)}
    # Where there are no experts both axes have the same replicas.
    make_exchange = partial(exchange_of, device=mesh.device) if config.zero_stage else Exchange
    exchanges = {group: make_exchange(group) for group in dict.fromkeys(groups_of.values())}
    return {
        axis: BucketOptions(
            dp_group=group,
            zero_stage=config.zero_stage,
            master_weights=config.master_weights,
            whole_parameters=not is_elementwise(optim),
            bucket_bytes=int(config.zero_bucket_size_in_mb * 2**20),
            exchange=exchanges[group],
        )
        for axis, group in groups_of.items()
    }


def _held_name(names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> str | None:
    """The first of a parameter's names that this stage has."""
    return next((name for name in names if name in parameters), None)


def shard_model(model: nn.Module, config: HybridParallelConfig, mesh: HybridMesh) -> list[dict[int, Tensor]]:
    """Shard in place; returns the parameters that several stages hold.

    Raises:
        ConfigurationError: the model cannot be sharded as asked, with all reasons.
    """
    changes_layers = (
        config.enable_fused_normalization,
        config.enable_flash_attention,
        config.enable_jit_fused,
        config.enable_all_optimization,
    )
    deals_out = config.ep_size > 1 or config.expert_capacity_factor is not None
    is_whole = config.tp_size == config.pp_size == config.cp_size == 1 and not deals_out
    if is_whole and config.custom_policy is None and not any(changes_layers):
        return []  # nothing to cut: a model of any kind will do
    stage, *further = config.schedule.stages_of(mesh.rank("pp"), config.pp_size, config.chunks_per_rank)
    num_stages = config.pp_size * config.chunks_per_rank
    split = None if config.layers_per_stage is None else tuple(config.layers_per_stage)
    with _mistakes():
        shard_config = ShardConfig(
            tensor_parallel_process_group=mesh.group("tp"),
            pipeline_stage_manager=PipelineStageManager(stage, num_stages, split, tuple(further)),
            enable_fused_normalization=config.enable_fused_normalization,
            enable_flash_attention=config.enable_flash_attention,
            enable_jit_fused=config.enable_jit_fused,
            enable_sequence_parallelism=config.cuts_over_tp,
            sequence_parallelism_mode=config.sequence_parallelism_mode if config.cuts_over_tp else "split_gather",
            context_parallel_process_group=mesh.group("cp"),
            context_parallel_mode=config.context_mode,
            enable_sequence_overlap=config.enable_sequence_overlap,
            enable_all_optimization=config.enable_all_optimization,
            make_vocab_size_divisible_by=config.make_vocab_size_divisible_by,
            compute_dtype=DTYPES.get(config.precision),
            sharding_dim=config.sharding_dim,
            expert_parallel_process_group=mesh.group(EXPERT_RANKS),
            expert_capacity_factor=config.expert_capacity_factor,
        )
        policy = as_policy(config.custom_policy) if config.tp_info is None else TPInfoPolicy(config.tp_info)
        return ShardFormer(shard_config).optimize(model, policy)[1]


def _cast(model: nn.Module, dtype: torch.dtype | None, keeps_masters: bool) -> dict[nn.Parameter, Tensor]:
    """Cast parameters (buffers keep their precision: rotary tables need it); returns their values before."""
    masters: dict[nn.Parameter, Tensor] = {}
    if dtype is None:
        return masters
    for param in model.parameters():
        if param.is_floating_point() and param.dtype != dtype:
            if keeps_masters and param.requires_grad:
                masters[param] = param.data
            param.data = param.data.to(dtype)
    return masters


def _stream(mesh: HybridMesh, seed: int) -> SharedStream | None:
    """Shared over tp, different on every stage and data-parallel rank; a single rank keeps torch's own stream."""
    coordinates = [mesh.rank(axis) for axis in ("pp", "dp", "cp")]
    sizes = [mesh.size(axis) for axis in ("pp", "dp", "cp", "tp")]
    if max(sizes) == 1:
        return None
    position = (coordinates[0] * sizes[1] + coordinates[1]) * sizes[2] + coordinates[2]
    return SharedStream(seed + 1_000_003 * (position + 1))
