"""Metrics of torchmetrics under a layout: each sample counts once, however many ranks a replica has.

torchmetrics joins the states of all ranks, and a list of states only if it is as long on each of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from booster.integrations.replicas import Replicas, map_tensors
from booster.takeover import AfterImport

_MODULE = "torchmetrics.metric"
_replicas: Replicas | None = None  # of the layout that came last
_has_all_samples = False


def join_metrics(replicas: Replicas) -> None:
    """Have metrics without a process group join their states over these replicas, also if imported later."""
    global _replicas
    is_first, _replicas = _replicas is None, replicas
    if is_first and _MODULE in sys.modules:
        _take(sys.modules[_MODULE])
    elif is_first:
        sys.meta_path.insert(0, AfterImport((_MODULE,), _take))


@contextmanager
def of_all_samples() -> Iterator[None]:
    """Join no states here: each replica has been given the samples of all of them."""
    global _has_all_samples
    before, _has_all_samples = _has_all_samples, True
    try:
        yield
    finally:
        _has_all_samples = before


def _take(module: ModuleType) -> None:
    """Change how metrics join their states."""
    join = module.Metric.sync

    @wraps(join)
    def sync(metric: Any, dist_sync_fn: Any = None, process_group: Any = None, *args: Any, **options: Any) -> None:
        group, function = process_group or metric.process_group, dist_sync_fn or metric.dist_sync_fn
        if not dist.is_initialized() or group is not None or function is not None or metric._is_synced:
            join(metric, dist_sync_fn, process_group, *args, **options)
        elif _replicas.size > 1 and not _has_all_samples and (args or (options.get("should_sync", True),))[0]:
            metric._cache, metric._is_synced = metric._copy_state_dict(), True
            for name, reduction in metric._reductions.items():
                setattr(metric, name, _joined(getattr(metric, name), reduction))

    module.Metric.sync = sync


def _joined(state: Tensor | list[Any], reduction: Callable[[Any], Any] | None) -> Any:
    """Return a state of all replicas: a tensor, or the values of a list, which may have other numbers of them."""
    is_list = isinstance(state, list)
    device = next((each.device for each in (state if is_list else [state]) if isinstance(each, Tensor)), "cpu")
    values = _replicas.gather_objects(map_tensors(Tensor.detach, state if is_list else [state]))
    values = map_tensors(lambda each: each.to(device), values)
    if not values:
        return []
    values = values if is_list else torch.stack(values)
    return values if reduction is None else reduction(values)
