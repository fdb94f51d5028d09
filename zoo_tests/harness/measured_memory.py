"""The persistent memory of a rank, measured: parameters, gradients and optimizer states.

It has no formulas, unlike the planner's `rank_memory.py`. A rank is simulated on the meta device with the code that
runs in training: the model is sharded, its parameters are placed into buckets, gradients are accumulated, and the
optimizer takes a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.boosted.model_api import WholeModel
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.mesh import build_mesh
from plugins.hybrid_parallel.planner.rank_memory import StaticMemory
from plugins.hybrid_parallel.setup.model import shard_model, wrap_model
from plugins.hybrid_parallel.setup.optimizer import build_optimizer, finish_model
from plugins.hybrid_parallel.shard_report import fake_rank
from plugins.hybrid_parallel.zero.stage3 import ShardedParameters
from shardformer.utils.module_paths import names_of_parameters


def static_memory(
    build: Callable[[], nn.Module],
    config: HybridParallelConfig,
    world_size: int,
    rank: int,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
) -> StaticMemory:
    """Measure the persistent memory of rank `rank` of `world_size`.

    Args:
        build: builds the whole model; called on the meta device.
        config: the layout.
        world_size: number of ranks.
        rank: the rank to simulate.
        optimizer: builds the optimizer of the model's parameters.

    Raises:
        ConfigurationError: the model cannot be sharded like this.
    """
    with fake_rank(rank, world_size):
        shape = config.parallel.mesh_shape(world_size)
        mesh = build_mesh(*shape, config.debugging.debug, ep_size=config.parallel.ep_size)
        with torch.device("meta"):
            model = build()
        optim = optimizer(model.parameters())
        names = names_of_parameters(model)
        groups = [list(group["params"]) for group in optim.param_groups]
        origin = WholeModel.of(model)
        shared = shard_model(model, config, mesh)
        built = wrap_model(model, config, mesh, 0, origin, shared)
        wrapped = build_optimizer(optim, groups, names, built, config, mesh)
        finish_model(built, config, mesh)
        for bucket in wrapped.buckets:
            for index, param in enumerate(bucket.params):
                bucket.accumulate(index, torch.empty(param.shape, dtype=param.dtype, device="meta"))
            bucket.launch()
            bucket.complete(None)
            bucket.keep(set(range(len(bucket.params))))
            bucket.assign_grads(None)
        optim.step()
        return memory_of(built.model)


def memory_of(
    model: HybridParallelModel, leaves_out: Callable[[torch.UntypedStorage], bool] = lambda storage: False
) -> StaticMemory:
    """Count the bytes that this rank holds of a boosted model and its optimizers, each storage once.

    Args:
        model: the boosted model.
        leaves_out: whether the bytes of a storage are not counted.
    """
    seen: set[int] = set()

    def count(tensors: Iterable[Tensor | None]) -> int:
        total = 0
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in seen and not leaves_out(storage):
                seen.add(storage._cdata)
                total += storage.nbytes()
        return total

    module = model.unwrap()
    members = sharded_members(model)
    buckets = [bucket for optimizer in model.optimizers for bucket in optimizer.buckets]
    return StaticMemory(
        parameters=count(module.parameters()) + count(member.shard for member in members),
        masters=count(piece.parameter for bucket in buckets for piece in bucket.pieces),
        gradients=count(grads for bucket in buckets for grads in (bucket.flat_grads, bucket.shard_grads))
        + count(piece.parameter.grad for bucket in buckets for piece in bucket.pieces),
        states=count(
            value
            for optimizer in model.optimizers
            for state in optimizer.optim.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ),
        buffers=count(module.buffers()),
    )


def sharded_members(model: HybridParallelModel) -> list[ShardedParameters]:
    """The memory of the parameters of which this rank keeps a shard (ZeRO stage 3)."""
    units = dict.fromkeys(model.gathers.units.of_parameter.values())
    return [member for unit in units for member in unit.members]
