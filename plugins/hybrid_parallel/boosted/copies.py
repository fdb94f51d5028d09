"""Copies of a boosted model, for averages of weights (EMA) and for teachers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from shardformer.shard_spec import annotate, grad_group_of, parameter_like


def copy_module(module: nn.Module, mesh: HybridMesh, memo: dict[int, Any]) -> nn.Module:
    """Make a deep copy of a sharded model: its own parameters and buffers, sharded the same way, on the same ranks.

    Args:
        memo: memo of `copy.deepcopy`; afterwards it includes the new parameters.
    """
    for shared in _shared(module, mesh):
        memo[id(shared)] = shared
    for parameter in module.parameters():
        made = memo[id(parameter)] = parameter_like(parameter, parameter.detach().clone())
        if (spec := getattr(parameter, "shard_spec", None)) is not None:
            annotate(made, spec, grad_group_of(parameter))
    return copy.deepcopy(module, memo)


def _shared(module: nn.Module, mesh: HybridMesh) -> Iterator[Any]:
    """Yield the objects that copies share: process groups cannot be copied, and pipeline passes run one at a time."""
    yield from (*mesh.axis_groups.values(), mesh.replica_group)
    for each in module.modules():
        for value in vars(each).values():
            if isinstance(value, ProcessGroup):
                yield value
            elif isinstance(group := getattr(value, "group", None), ProcessGroup):
                yield group
        if (views := vars(each).get("stage_views")) is not None:
            yield views.stage_input
