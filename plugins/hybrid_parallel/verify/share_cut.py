"""Share of a model's parameters and FLOPs that tensor parallelism divides, measured without ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.mesh import build_mesh
from plugins.hybrid_parallel.inspect.shard_report import fake_rank
from plugins.hybrid_parallel.planner.model_flops import FlopCounter
from plugins.hybrid_parallel.setup.model import shard_model
from shardformer.shard_spec import divided_share


@dataclass(frozen=True)
class ShareCut:
    """Shares between 0 (every rank has all of it) and 1 (the ranks divide all of it).

    Attributes:
        parameters: share of the elements of all parameters that are sharded.
        flops: share of the FLOPs of matrix products and attention in a forward pass that the ranks divide; None if the
            sharded model does not run without real communication.
    """

    parameters: float
    flops: float | None

    def __str__(self) -> str:
        flops = "unknown" if self.flops is None else f"{self.flops:.0%}"
        return f"{self.parameters:.0%} of the parameters, {flops} of the FLOPs"


def share_cut(build: Callable[[], nn.Module], batch: Mapping[str, Any], tp_size: int = 2, **options: Any) -> ShareCut:
    """Measure the shares that `tp_size` ranks divide.

    Args:
        build: builds the whole model; called twice.
        batch: inputs of a forward pass.
        tp_size: number of tensor-parallel ranks.
        options: further options of `HybridParallelPlugin`, such as `custom_policy`.

    Raises:
        ConfigurationError: the model cannot be sharded, or process groups already exist.
    """
    whole_flops = _flops(build(), batch)
    config = HybridParallelConfig.from_options(tp_size=tp_size, dp_size=1, **options)
    with fake_rank(0, tp_size):
        mesh = build_mesh(*config.parallel.mesh_shape(tp_size))
        model = build()
        shard_model(model, config, mesh)
        share, local_flops = divided_share(model.parameters()), _flops(model, batch)
    return ShareCut(share, _divided(whole_flops, local_flops, tp_size))


def parameters_cut(model: nn.Module, tp_size: int = 2, **options: Any) -> float:
    """Shard a model, which may be on the meta device, and return the share of its parameters that ranks divide.

    Args:
        model: is changed.
        tp_size: number of tensor-parallel ranks.
        options: further options of `HybridParallelPlugin`.

    Raises:
        ConfigurationError: the model cannot be sharded, or process groups already exist.
    """
    config = HybridParallelConfig.from_options(tp_size=tp_size, dp_size=1, **options)
    with fake_rank(0, tp_size):
        shard_model(model, config, build_mesh(*config.parallel.mesh_shape(tp_size)))
        return divided_share(model.parameters())


def _divided(whole: float | None, local: float | None, tp_size: int) -> float | None:
    """Solve local = whole * (1 - share + share / tp_size) for the share."""
    if not whole or local is None or tp_size == 1:
        return None
    share = (1 - local / whole) * tp_size / (tp_size - 1)
    return min(max(share, 0.0), 1.0)


def _flops(model: nn.Module, batch: Mapping[str, Any]) -> float | None:
    """Count the FLOPs of a forward pass; None if it fails, as values are arbitrary without communication."""
    counter = FlopCounter()
    try:
        with torch.no_grad(), counter:
            model(**batch)
    except Exception:  # arbitrary exception types of arbitrary models
        return None
    return counter.flops
