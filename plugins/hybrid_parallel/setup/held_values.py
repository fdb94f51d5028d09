"""Values that a model does without until ZeRO stage 3 shards them, one parameter at a time.

The tensor- and pipeline-parallel part of a rank is thus never whole in its memory. Parameters have their shape, dtype
and device meanwhile, and no values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh, replicate_axis
from plugins.hybrid_parallel.setup.offload import offloads_parameters
from plugins.hybrid_parallel.zero.gather_units import is_sharded
from plugins.hybrid_parallel.zero.initial_values import Source, without_values
from shardformer.lazy import RecordedValues, WeightReader, read_values
from shardformer.shard_spec import EXPERTS, TENSOR, annotate, grad_group_of, parameter_like, spec_of


def shards_by_axis(config: HybridParallelConfig, mesh: HybridMesh) -> Mapping[str, int]:
    """Return the number of ranks that share the states of parameters, by the axis over which these are sharded."""
    sizes = {axis: dist.get_world_size(mesh.group(replicate_axis(axis))) for axis in (TENSOR, EXPERTS)}
    if not config.zero.zero_stage:
        return sizes
    # Experts have fewer replicas.
    num_shards = config.zero.num_shards(mesh.size(DP_CP))
    return {axis: math.gcd(num_shards, size) for axis, size in sizes.items()}


def hold_values(
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
    has_file = offloads_parameters(config, mesh.device)  # where one rank alone keeps its parameters too
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
        return read_values(reader, name, param).to(dtype)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
