"""Values of a model that `boost` was given: made equal on all ranks, cast, or deferred until ZeRO stage 3 shards them.

A head that was initialized without a seed differs from rank to rank. Deferred values come one parameter at a time, so
that the tensor- and pipeline-parallel part of a rank is never whole in its memory.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.config.groups import PrecisionOptions
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.agreement import checksum
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh, replicate_axis
from plugins.hybrid_parallel.setup.input_checks import as_configuration_error
from plugins.hybrid_parallel.zero.bucket_layout import Source, take_source, without_values
from plugins.hybrid_parallel.zero.reducer import hooked_names
from plugins.hybrid_parallel.zero.stage3 import is_sharded
from shardformer import lazy
from shardformer.distributed.process_groups import all_gather_json, world_group
from shardformer.lazy import RecordedValues, WeightReader
from shardformer.matmul.quantised import is_quantised, stored_tensors
from shardformer.shard_spec import EXPERTS, TENSOR, annotate, grad_group_of, parameter_like, spec_of

_logger = get_logger(__name__)


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
