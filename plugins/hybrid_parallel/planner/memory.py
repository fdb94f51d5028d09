"""Bytes that a rank keeps from step to step: parameters, gradients, optimizer states.

They are not computed from formulas. A rank is played on the meta device: the model is sharded, its parameters go into
buckets, gradients arrive, and the optimizer takes a step, by the code that does so in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plugins.hybrid_parallel.boosted.model import HybridParallelModel, WholeModel
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.mesh import build_mesh
from plugins.hybrid_parallel.inspect.shard_report import playing
from plugins.hybrid_parallel.setup.model import shard_model, wrap_model
from plugins.hybrid_parallel.setup.optimizer import build_optimizer
from shardformer.utils.parameter_names import names_of_parameters


@dataclass(frozen=True)
class StaticMemory:
    """Bytes of one rank, between two steps of training.

    Attributes:
        parameters: as they are trained in, in flat buffers, those that are not trained beside.
        masters: the optimizer's fp32 copies of 16-bit parameters.
        gradients: accumulated and reduced ones.
        states: of the optimizer.
        buffers: of the model.
    """

    parameters: int
    masters: int
    gradients: int
    states: int
    buffers: int

    @property
    def total(self) -> int:
        return self.parameters + self.masters + self.gradients + self.states + self.buffers


def static_memory(
    build: Callable[[], nn.Module],
    config: HybridParallelConfig,
    world_size: int,
    rank: int,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
) -> StaticMemory:
    """What rank `rank` of `world_size` keeps.

    Args:
        build: makes the whole model; called on the meta device.
        optimizer: makes the optimizer of its parameters.

    Raises:
        ConfigurationError: the model cannot be cut like this.
    """
    with playing(rank, world_size):
        sizes = config.pp_size, config.data_parallel_size(world_size), config.cp_size, config.tp_size
        mesh = build_mesh(*sizes, config.debug, ep_size=config.ep_size)
        with torch.device("meta"):
            model = build()
        optim = optimizer(model.parameters())
        names = names_of_parameters(model)
        groups = [list(group["params"]) for group in optim.param_groups]
        origin = WholeModel.of(model)
        shared = shard_model(model, config, mesh)
        built = wrap_model(model, config, mesh, 0, origin, shared)
        wrapped = build_optimizer(optim, groups, names, built, config, mesh)
        for bucket in wrapped.buckets:
            for index, param in enumerate(bucket.params):
                bucket.accumulate(index, torch.empty_like(param))
            bucket.launch()
            bucket.finish(set(range(len(bucket.params))), None)
            bucket.assign_grads(None)
        optim.step()
        return memory_of(built.model)


def memory_of(model: HybridParallelModel) -> StaticMemory:
    """What this rank keeps of a boosted model and its optimizers; each piece of memory counted once."""
    seen: set[int] = set()

    def count(tensors: Iterable[Tensor | None]) -> int:
        total = 0
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
        return total

    module = model.unwrap()
    buckets = [bucket for optimizer in model.optimizers for bucket in optimizer.buckets]
    return StaticMemory(
        parameters=count(module.parameters()),
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
