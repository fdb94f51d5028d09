"""Time a few steps of a layout on the real devices, with a temporary copy of the model."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster import Booster
from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.distributed.mesh import control_group
from plugins.hybrid_parallel.plugin import HybridParallelPlugin

_logger = get_logger(__name__)
_WARM_UPS = 2


@dataclass(frozen=True)
class Trial:
    """Setup with which every layout is tried.

    Attributes:
        build: builds a new copy of the model, on the meta device or with values.
        optimizer: builds an optimizer of its parameters.
        criterion: the user's loss, or None.
        batches: plugin -> iterable of the batches of one replica.
        steps: number of timed steps.
    """

    build: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    criterion: Callable[[Any, Any], Any] | None
    batches: Callable[[HybridParallelPlugin], Any]
    steps: int


def seconds_of(options: Mapping[str, Any], trial: Trial) -> float | None:
    """Measure the median seconds of a step on the slowest rank; None if the layout fails on any rank.

    All ranks must call this.
    """
    try:
        times = _run(options, trial)
    except (ConfigurationError, torch.OutOfMemoryError, RuntimeError) as error:
        _logger.warning("the layout %s fails: %s", dict(options), " ".join(str(error).split())[:200])
        times = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    slowest = torch.tensor(float("inf") if times is None else statistics.median(times))
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=control_group())
    return None if slowest.isinf() else float(slowest)


def _run(options: Mapping[str, Any], trial: Trial) -> list[float]:
    plugin = HybridParallelPlugin.from_config(dict(options))
    booster = Booster(plugin=plugin)
    model = trial.build()
    model, optimizer = booster.boost(model, trial.optimizer(model.parameters()))
    batches, times = iter(trial.batches(plugin)), []
    for _ in range(_WARM_UPS + trial.steps):
        batch = next(batches, None)
        if batch is None:
            batches = iter(trial.batches(plugin))
            batch = next(batches)
        began = time.perf_counter()
        booster.execute_pipeline(iter([batch]), model, trial.criterion, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if plugin.grid.device.type == "cuda":
            torch.cuda.synchronize(plugin.grid.device)
        times.append(time.perf_counter() - began)
    return times[_WARM_UPS:]


def alike(optimizer: torch.optim.Optimizer) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that builds an optimizer of the same class with the same defaults."""
    defaults = copy.deepcopy(optimizer.defaults)

    def make(params: Any) -> torch.optim.Optimizer:
        made = type(optimizer)(params, lr=defaults.get("lr", 1e-3))
        for group in made.param_groups:
            group |= defaults
        return made

    return make
