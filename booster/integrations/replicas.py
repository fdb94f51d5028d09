"""Values of all data-parallel replicas: what `gather` and `reduce` of other libraries mean under any layout.

The ranks of one replica (tensor, pipeline and context parallel) have the same batch and the same outputs, so that only
one of them counts. Metrics of torchmetrics count each sample once, and join lists of states of any lengths, where
torchmetrics alone joins the states of all ranks, and only lists as long on each of them.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from booster.errors import ConfigurationError
from booster.plugin import Plugin
from booster.takeover import AfterImport
from shardformer.distributed.process_groups import broadcast_json, world_group
from shardformer.utils.typed_json import from_json, to_json

_REDUCTIONS = ("sum", "mean", "max", "none")
_MOST_DIMS = 16  # of a tensor that is gathered


class Replicas:
    """The data-parallel replicas of a plugin's layout.

    Args:
        plugin: a plugin with `mesh`, a `DeviceMesh` with the axis "dp".

    Raises:
        ConfigurationError: if the plugin has no such mesh.
    """

    def __init__(self, plugin: Plugin) -> None:
        if not isinstance(plugin, Plugin):
            raise ConfigurationError(
                f"plugin={plugin!r} is no parallel training strategy; give one, as in plugin=HybridParallelPlugin()"
            )
        if not hasattr(plugin, "mesh"):
            raise ConfigurationError(
                f"{type(plugin).__name__} has no mesh with the axis 'dp'; use HybridParallelPlugin"
            )
        self.mesh = plugin.mesh["dp"]
        self._inside = [plugin.mesh[axis] for axis in plugin.mesh.mesh_dim_names if axis != "dp"]

    @property
    def size(self) -> int:
        """Number of replicas."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """Which replica this rank belongs to."""
        return self.mesh.get_local_rank()

    def of_first_ranks(self, tensor: Tensor) -> Tensor:
        """Return what the first rank of this replica has, for values that a clock or another program may tell."""
        tensor = tensor.detach().clone()
        for axis in self._inside:
            if axis.size() > 1:
                dist.broadcast(tensor, group=axis.get_group(), group_src=0)
        return tensor

    def on_first_rank(self, work: Callable[[], Any], of_job: bool = False) -> Any:
        """Return what `work` returns on the first rank of this replica, which alone calls it.

        Args:
            work: returns plain values and containers of them.
            of_job: call it on the first of all ranks instead.

        Raises:
            RuntimeError: it failed, with its message; raised on all of these ranks.
        """
        groups = [world_group()] if of_job else [axis.get_group() for axis in self._inside if axis.size() > 1]
        result, cause = None, None
        if all(dist.get_rank(group) == 0 for group in groups):
            try:
                result = [True, to_json(work(), "the result")]
            except Exception as error:  # of any kind: the other ranks wait
                result, cause = [False, str(error) or type(error).__name__], error
        for group in groups:
            result = broadcast_json(result, group, dist.get_global_rank(group, 0))
        succeeded, value = result
        if not succeeded:
            raise RuntimeError(value) from cause
        return from_json(value)

    def raise_on_all_ranks(
        self, problem: str | None, cause: Exception | None = None, kind: type[Exception] = ConfigurationError
    ) -> None:
        """Raise the problem of the first rank of the job that has one, on all of them."""
        first = torch.tensor(dist.get_world_size() if problem is None else dist.get_rank())
        dist.all_reduce(first, dist.ReduceOp.MIN, group=world_group())
        if first < dist.get_world_size():
            raise kind(broadcast_json(problem, source=int(first))) from cause

    def gather(self, data: Any) -> Any:
        """Return nested tensors of all replicas, joined along dim 0, to which each may contribute another number.

        A 0-d tensor contributes one row. With one replica, tensors are returned as they are.

        Raises:
            ConfigurationError: if rows have other shapes on other replicas; raised on all of them.
        """
        if self.size == 1:
            return data
        return map_tensors(self._gather_tensor, data)

    def gather_objects(self, data: list[Any]) -> list[Any]:
        """Return the lists of all replicas, of plain values, tensors and containers of them, one after the other."""
        if self.size == 1:
            return data
        apart: list[Tensor] = []
        try:
            text = json.dumps(to_json(data, "the list", apart)).encode()
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
        own = [torch.tensor(list(text), dtype=torch.uint8), *apart]
        counts = self._gather_tensor(torch.tensor(len(own))).tolist()
        lengths = self._gather_tensor(torch.tensor([len(each) for each in own])).tolist()
        parts = iter(self._gather_tensor(torch.cat(own)).split(lengths))
        of_all = [[next(parts).clone() for _ in range(count)] for count in counts]  # a view starts anywhere
        return [each for text, *apart in of_all for each in from_json(json.loads(bytes(text.tolist())), apart)]

    def reduce(self, data: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return nested tensors combined over replicas: "sum", "mean" or "max", or as they are: "none".

        A sum or mean is differentiable: `backward` takes the mean of the replicas' losses, which are the same then.

        Raises:
            ConfigurationError: for another reduction.
        """
        if reduction not in _REDUCTIONS:
            raise ConfigurationError(f"reduction={reduction!r} is not one of {', '.join(_REDUCTIONS)}")
        factor = scale / self.size if reduction == "mean" else scale
        operation = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM

        def reduced(tensor: Tensor) -> Tensor:
            total = tensor.detach().clone()
            if reduction != "none" and self.size > 1:
                dist.all_reduce(total, operation, group=self.mesh.get_group())
            total = total * factor if factor != 1.0 else total
            if not tensor.requires_grad or reduction == "max":
                return total
            own = tensor if reduction == "none" else tensor * (factor * self.size)
            return total + (own - own.detach())

        return map_tensors(reduced, data)

    def _gather_tensor(self, tensor: Tensor) -> Tensor:
        group = self.mesh.get_group()
        tensor = (tensor[None] if tensor.dim() == 0 else tensor).detach().contiguous()
        shapes = self._shapes(tensor)
        counts = [shape[0] for shape in shapes]
        # A replica without rows does not know how long the rows of the others are.
        rows = {tuple(shape[1:]) for shape in shapes if shape[0]} or {tuple(tensor.shape[1:])}
        if len(rows) > 1:
            raise ConfigurationError(
                f"replicas have tensors of the shapes {shapes}, which cannot be joined; pad them before, as in "
                "accelerator.pad_across_processes(tensor, dim=1)"
            )
        padded = tensor.new_zeros(max(counts), *rows.pop())
        if len(tensor):
            padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def _shapes(self, tensor: Tensor) -> list[list[int]]:
        """Return the shape of a tensor on each replica."""
        own = torch.full((1 + _MOST_DIMS,), 0, dtype=torch.int64, device=tensor.device)
        own[0], own[1 : 1 + tensor.dim()] = tensor.dim(), torch.tensor(tensor.shape, device=tensor.device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.mesh.get_group())
        return [shape[1 : 1 + shape[0]] for shape in (each.tolist() for each in found)]


def map_tensors(function: Callable[[Tensor], Any], data: Any) -> Any:
    """Apply a function to all tensors in nested containers; other values stay."""
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, Mapping):
        result = copy.copy(data)  # outputs of a model, or of a tokenizer, stay what they are
        for key, value in data.items():
            result[key] = map_tensors(function, value)
        return result
    if isinstance(data, tuple | list):
        values = [map_tensors(function, value) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
    return data


def holds_tensors(data: Any) -> bool:
    """Return whether nested containers hold a tensor."""
    if isinstance(data, Mapping):
        data = list(data.values())
    return isinstance(data, Tensor) or (isinstance(data, tuple | list) and any(map(holds_tensors, data)))


class ReplicaMeans(Tensor):
    """One value of each replica, [replicas]: a mean over its samples, or a sum.

    `mean()` is that over all samples, also where replicas have different numbers of them, or none. Everything else is
    as for plain tensors, and returns plain tensors.
    """

    rows: Tensor  # number of samples of each replica, [replicas]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(values: Tensor, rows: Tensor) -> ReplicaMeans:
        """Return `values` of replicas with so many samples."""
        means = values.as_subclass(ReplicaMeans)
        means.rows = rows
        return means

    def detach(self) -> ReplicaMeans:
        """Return these values: what is gathered has no gradient."""
        return self

    def mean(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean over the samples of all replicas (0-d)."""
        values = self.as_subclass(Tensor)
        if args or kwargs or not int(self.rows.sum()):
            return values.mean(*args, **kwargs)
        shares = (self.rows / self.rows.sum()).to(values.dtype)
        return (values.where(self.rows > 0, 0) * shares).sum()  # the mean over no samples is nan


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
