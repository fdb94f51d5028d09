"""Steps of `configure` for an optimizer: from the user's to one over shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from booster.failure import peers
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.agreement import checked_collectives
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh, replicate_axis, shard_groups, stage_group
from plugins.hybrid_parallel.features.feature import Feature, Parts, features_of
from plugins.hybrid_parallel.features.nonfinite import on_nonfinite
from plugins.hybrid_parallel.setup.initial_weights import shards_by_axis
from plugins.hybrid_parallel.setup.input_checks import check_options_against_model
from plugins.hybrid_parallel.setup.model import BuiltModel, build_model
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.bucket_layout import BucketOptions, GradBufferPool, Source, StateMemory, TiedParameter
from plugins.hybrid_parallel.zero.collectives.backend import ZeroCollectives
from plugins.hybrid_parallel.zero.collectives.p2p import HierarchicalCollectives, P2PCollectives
from plugins.hybrid_parallel.zero.collectives.shared_memory import SharedMemoryCollectives, meet_neighbours
from plugins.hybrid_parallel.zero.granularity import Granularity, granularity_of
from plugins.hybrid_parallel.zero.optimizer import (
    FrozenParameters,
    HybridParallelOptimizer,
    LocalParameters,
    StepOptions,
)
from plugins.hybrid_parallel.zero.reducer import GradientHooks, GradientReducer, take_hooks
from plugins.hybrid_parallel.zero.stage3 import ParameterGathers
from plugins.hybrid_parallel.zero.user_optimizer import move_overrides, place_states, take_states
from plugins.hybrid_parallel.zero.whole_parameters import WholeParameters
from shardformer.distributed.process_groups import all_gather_json
from shardformer.layers.parallel_module import replace_native_layers
from shardformer.shard_spec import EXPERTS, TENSOR, grad_group_of, spec_of
from shardformer.utils.freed_memory import return_freed_memory
from shardformer.utils.module_paths import names_of_parameters

Sized = TypeVar("Sized")  # a parameter, or a description of one, with `numel`


def build_trained(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: HybridParallelConfig,
    mesh: HybridMesh,
    seed: Callable[[], int] = lambda: 0,
) -> BuiltModel:
    """Check, shard, wrap a model in place; re-point its optimizers; `seed`: returns that of the random numbers."""
    names = names_of_parameters(model)
    features = features_of(config, model)
    check_options_against_model(config, model, optimizers, names, mesh, features)
    original = [[list(group["params"]) for group in optim.param_groups] for optim in optimizers]
    number = seed()
    with checked_collectives(config.checks_collectives):
        built = build_model(model, config, mesh, number, bool(optimizers), features)
    for optim, groups in zip(optimizers, original, strict=True):
        build_optimizer(optim, groups, names, built, config, mesh, number, len(original) == 1)
    finish_model(built, config, mesh)
    return built


def build_optimizer(
    optim: torch.optim.Optimizer,
    groups: Sequence[Sequence[nn.Parameter]],
    names: Mapping[int, Sequence[str]],
    built: BuiltModel,
    config: HybridParallelConfig,
    mesh: HybridMesh,
    seed: int = 0,
    stands_alone: bool = True,
) -> HybridParallelOptimizer:
    """Re-point an optimizer at the shards of its parameters, by name, and add it to the model's optimizers.

    Args:
        groups: the parameters that its groups held before the model was sharded.
        names: id of each of these parameters -> its names, several if it is tied.
        seed: seed of the random numbers that gradient hooks draw.
        stands_alone: whether it is the model's only optimizer.
    """
    model = built.model
    parameters = dict(model.unwrap().named_parameters(remove_duplicate=False))
    order = _held(groups, names, parameters)
    old = {param: whole for param, whole in zip(chain(*order), chain(*groups), strict=True) if param is not None}
    move_overrides(optim, ((whole, param) for param, whole in old.items()))
    granularity = granularity_of(optim)
    _choose_fused(optim, mesh.device)
    trained = _by_requires_grad(order, trains=True)
    memory = built.parts.storage.of_states(optim, members := list(chain(*trained)))
    options = _bucket_options(granularity, config, built.parts, memory, members)
    states = take_states(optim, old)
    if config.zero.zero_stage == 3 and not model.optimizers:
        model.shard_parameters()
    kind = {"options": options, "tied": model.tied, "bucket_type": built.parts.bucket, "gathers": model.gathers}
    buckets = build_buckets(trained, initial=built.initial, **kind)
    first_names = {param: name for name, param in reversed(parameters.items())}
    wholes = _whole_parameters(granularity, config, mesh, options, model.tied, first_names)
    owned = wholes.add(buckets)
    wholes.take_states(states)
    place_states(optim, states, [*buckets, *owned])
    build_more = partial(build_buckets, initial={}, **kind)
    frozen = FrozenParameters(_by_requires_grad(order, trains=False), build_more, states, model.gathers)
    hooks = {param: take_hooks(whole) for param, whole in old.items()}  # before the reducer registers its own hooks
    gradient_hooks = GradientHooks(hooks, first_names, mesh, built.loss_scale, seed)
    group_names = [[names[id(param)][0] for param in group] for group in groups]
    reducer = _make_reducer(buckets, gradient_hooks, built.parts, config, stands_alone)
    local = LocalParameters(first_names, order, frozen, wholes, group_names)
    step = StepOptions(
        config.zero.max_norm,
        config.debugging.nonfinite,
        config.zero.overlap_allgather,
        on_nonfinite=partial(on_nonfinite, trace=model.trace, mesh=mesh),
        after_step=partial(_after_step, model=model, features=built.features),
    )
    wrapped = HybridParallelOptimizer(optim, buckets, reducer, local, model, built.loss_scale, step, memory)
    model.optimizers.append(wrapped)
    return wrapped


def _choose_fused(optim: torch.optim.Optimizer, device: torch.device) -> None:
    """Let Adam step by torch's fused kernel, on a GPU or the host of one, if the user has chosen none."""
    if device.type != "cuda" or type(optim) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    for group in optim.param_groups:
        if group["fused"] is None and group["foreach"] is None and not (group["capturable"] or group["differentiable"]):
            group["fused"] = True


def _held(
    groups: Sequence[Sequence[nn.Parameter]], names: Mapping[int, Sequence[str]], parameters: Mapping[str, nn.Parameter]
) -> list[list[nn.Parameter | None]]:
    """Return this stage's parameters by whichever of their names it has; None for those of other stages."""
    return [
        [next((parameters[name] for name in names[id(param)] if name in parameters), None) for param in group]
        for group in groups
    ]


def _after_step(step: HybridParallelOptimizer, model: HybridParallelModel, features: Sequence[Feature]) -> None:
    for feature in features:
        feature.after_step(step, model)


def _make_reducer(
    buckets: Sequence[Bucket],
    hooks: GradientHooks,
    parts: Parts,
    config: HybridParallelConfig,
    stands_alone: bool,
) -> GradientReducer:
    """Return what reduces the gradients of `buckets`; let the layers of the model write there where they can."""
    parallel = config.parallel
    waits = parallel.pp_size == parallel.cp_size == parallel.ep_size == 1
    # On a replica with unused parameters, the buckets of two optimizers would be complete in a different order.
    overlaps = config.zero.overlap_communication and stands_alone and parts.units is None
    reducer = parts.reducer(buckets, parts.mesh.group(DP_CP), overlaps, waits, hooks)
    if reducer.attaches_grad_buffers:
        replace_native_layers(parts.module, with_buffers=parts.mesh.device.type != "cpu")
    return reducer


def finish_model(built: BuiltModel, config: HybridParallelConfig, mesh: HybridMesh) -> None:
    """Finish a model whose optimizers are built.

    The parameters that no optimizer trains are sharded, and all sharded ones are gathered before use (ZeRO stage 3).
    Hooks that use parameters come after that.
    """
    if config.zero.zero_stage == 3 and built.model.optimizers:
        trained = {param for optimizer in built.model.optimizers for each in optimizer.buckets for param in each.params}
        frozen = [param for param in built.model.unwrap().parameters() if param not in trained]
        options = _bucket_options(Granularity.ELEMENT, config, built.parts, StateMemory(), frozen)
        built.model.gathers.shard_frozen(options, built.initial)
        built.model.gathers.attach()
    for feature in built.features:
        feature.finished(built.model)


def _by_requires_grad(groups: Sequence[Sequence[nn.Parameter | None]], trains: bool) -> list[list[nn.Parameter]]:
    """Return the parameters on this rank that are trained, or that are frozen, by group."""
    return [[param for param in group if param is not None and param.requires_grad == trains] for group in groups]


def _whole_parameters(
    granularity: Granularity,
    config: HybridParallelConfig,
    mesh: HybridMesh,
    options: Mapping[str, BucketOptions],
    tied: Mapping[nn.Parameter, TiedParameter],
    names: Mapping[nn.Parameter, str],
) -> WholeParameters:
    """Return the parameters that an optimizer of this granularity must read whole; all ranks must call this."""
    groups = {}
    if granularity is not Granularity.ELEMENT:
        # Under stage 0 replicas hold the same parts, so each has owners of its own.
        groups = {axis: stage_group(mesh) if config.zero.zero_stage else mesh.group(axis) for axis in (TENSOR, EXPERTS)}

    def counted(param: nn.Parameter) -> bool:
        return options[spec_of(param).axis].counts and (param not in tied or tied[param].counted)

    return WholeParameters(groups, names, counted)


def _bucket_options(
    granularity: Granularity,
    config: HybridParallelConfig,
    parts: Parts,
    states: StateMemory,
    params: Sequence[nn.Parameter],
) -> dict[str, BucketOptions]:
    """Return the options of the buckets of `params` by axis, over which the parameters in a bucket are sharded."""
    mesh = parts.mesh
    groups_of = {axis: mesh.group(replicate_axis(axis)) for axis in (TENSOR, EXPERTS)}
    sharing, copies = {}, {}
    for axis, count in shards_by_axis(config, mesh).items():
        sharing[axis], copies[axis] = shard_groups(mesh, replicate_axis(axis), count)
    # Without experts, both axes have the same replicas.
    make_exchange = partial(exchange_of, device=mesh.device) if config.zero.zero_stage else ZeroCollectives
    exchanges = {group: make_exchange(group) for group in dict.fromkeys(sharing.values())}
    shard_memory = parts.storage.of_shards(params)
    for exchange in () if shard_memory is None else exchanges.values():
        exchange.keep_shards_in(shard_memory)
    bucket_bytes = config.zero.bucket_bytes(mesh.device.type)
    pools = {group: GradBufferPool(exchange, bucket_bytes) for group, exchange in exchanges.items()}
    return {
        axis: BucketOptions(
            dp_group=group,
            shard_group=sharing[axis],
            copy_group=copies[axis],
            zero_stage=config.zero.zero_stage,
            master_weights=config.mixed_precision.master_weights,
            whole_parameters=granularity is not Granularity.ELEMENT,
            bucket_bytes=bucket_bytes,
            exchange=exchanges[sharing[axis]],
            grad_buffers=pools[sharing[axis]],
            states=states,
            keeps_local=config.debugging.nonfinite != "ignore",
            hidden_by=_what_hides_gradients(config, mesh),
        )
        for axis, group in groups_of.items()
    }


def _what_hides_gradients(config: HybridParallelConfig, mesh: HybridMesh) -> str | None:
    """Return the options under which ranks share or scale gradients; None if each has them as in plain torch."""
    sizes = {name: getattr(config.parallel, name) for name in ("tp_size", "pp_size", "ep_size")}
    reasons = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    if config.zero.num_shards(mesh.size(DP_CP)) > 1:
        reasons.append(f"zero_stage={config.zero.zero_stage} with {mesh.size(DP_CP)} replicas")
    if config.mixed_precision.precision == "fp16":
        reasons.append("precision='fp16'")
    return " and ".join(reasons) or None


def build_buckets(
    groups: Sequence[Sequence[nn.Parameter]],
    options: Mapping[str, BucketOptions],
    tied: Mapping[nn.Parameter, TiedParameter],
    initial: dict[nn.Parameter, Source],
    gathers: ParameterGathers | None = None,
    bucket_type: type[Bucket] = Bucket,
) -> list[Bucket]:
    """Sort the parameters of each group into buckets, in the order in which a backward pass completes these.

    Args:
        options: axis over which parameters are sharded -> the options of their buckets.
        initial: sources of the full-precision values of parameters that were cast to a lower precision or have no
            values; used ones are removed.
        gathers: takes over the parameters that ranks shard (ZeRO stage 3); None if they shard none.
    """
    buckets = []
    units = {} if gathers is None else gathers.units.of_parameter
    for group_index, params in enumerate(groups):
        kinds: dict[tuple, list[nn.Parameter]] = {}
        # The backward pass reaches the last parameters first: their bucket is reduced while it continues.
        arrival = {param: place for place, param in enumerate(reversed(params))}
        for param in arrival:
            tie = tied.get(param)
            order = -1 if tie is None else tie.order
            unit = units.get(param)  # also if nothing is sharded: sums over buckets then have the same bits
            key = (order, param.dtype, grad_group_of(param), spec_of(param).is_owner, spec_of(param).axis, unit)
            kinds.setdefault(key, []).append(param)
        chunks = [
            (key, chunk) for key, members in kinds.items() for chunk in chunks_of(members, options[key[4]].bucket_bytes)
        ]
        # Tied buckets come last and in one order: stages wait for each other there, and never in the middle. A bucket
        # that is complete late, such as that of small parameters of all layers, would hold up those behind it.
        for key, chunk in sorted(chunks, key=lambda item: (item[0][0], max(arrival[param] for param in item[1]))):
            order, _, grad_group, is_owner, axis, unit = key
            tie = tied[chunk[0]] if order >= 0 else None
            tied_group = tie.group if tie else None
            copies = options[axis].copy_group
            sum_groups = [group for group in (copies, grad_group, tied_group) if group is not None]
            counted = is_owner and options[axis].counts and (tie is None or tie.counted)
            is_sharded = unit is not None and options[axis].shards_parameters
            about = (group_index, sum_groups, counted, initial, tied_group, is_sharded)
            bucket = bucket_type(chunk, options[axis], *about)
            buckets.append(bucket)
            if bucket.sharded is not None:
                gathers.own(bucket.params, bucket.sharded)
            return_freed_memory()  # of the parameters that are now in the bucket
    return sorted(buckets, key=lambda bucket: any(param in tied for param in bucket.params))


def chunks_of(params: Sequence[Sized], limit: int) -> Iterator[list[Sized]]:
    """Yield runs of neighbouring parameters with up to `limit` bytes of fp32 gradients."""
    chunk: list[Sized] = []
    size = 0
    for param in params:
        if chunk and size + param.numel() * 4 > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append(param)
        size += param.numel() * 4
    if chunk:
        yield chunk


def exchange_of(group: ProcessGroup, device: torch.device) -> ZeroCollectives:
    """Choose the fastest collectives for these ranks; must be called on all of them."""
    uses_gloo = device.type == "cpu" and "gloo" in str(dist.get_backend_config(group))
    if not uses_gloo or dist.get_world_size(group) == 1:
        return ZeroCollectives(group)
    neighbours = meet_neighbours(group)
    if neighbours is not None:
        return SharedMemoryCollectives(group, neighbours)
    per_machine = ranks_per_machine(all_gather_json(peers.machine(), group))
    return P2PCollectives(group) if per_machine == 1 else HierarchicalCollectives(group, per_machine)


def ranks_per_machine(machines: Sequence[str]) -> int:
    """Return how many ranks each of `machines` (one entry a rank) has; 1 if that differs, or one has all."""
    count = next((rank for rank, name in enumerate(machines) if name != machines[0]), len(machines))
    blocks = [set(machines[start : start + count]) for start in range(0, len(machines), count)]
    is_regular = len(machines) % count == 0 and all(len(block) == 1 for block in blocks)
    is_apart = len(set(machines)) == len(blocks) > 1
    return count if is_regular and is_apart else 1
