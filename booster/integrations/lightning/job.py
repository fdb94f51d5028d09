"""What Trainer and Fabric ask any strategy: where a rank is, values of all replicas, folders of checkpoints, precision.

What they are asked for and cannot hold under a layout is refused in `checks.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import plugins as trainer_plugins
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from booster.booster import Booster
from booster.errors import ConfigurationError
from booster.integrations.lightning import checks
from booster.integrations.lightning.inner_model import ReplicaShares, boosted_in
from booster.integrations.replicas import Replicas, join_metrics
from booster.launch import launch_from_torch, place_from_environment
from booster.plugin import Plugin
from shardformer.distributed.process_groups import broadcast_json, world_group
from shardformer.lazy.weight_files import WeightFileError, refuses_code
from shardformer.utils.typed_json import from_json, to_json


class BoostedPrecision(trainer_plugins.Precision):
    """What a Trainer does around a step, on boosted optimizers."""

    def __init__(self, given: Any, plugin: Plugin) -> None:
        self.precision = given.precision
        self._autocast = given if checks.autocasts(given, plugin) else None

    def forward_context(self) -> AbstractContextManager[None]:
        """Return a context for the user's step: autocast, if the Trainer asks for it and the plugin does not."""
        return super().forward_context() if self._autocast is None else self._autocast.forward_context()

    def optimizer_step(self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run forward and backward pass, then step: a boosted optimizer takes no closure."""
        result = closure()
        self._after_closure(model, optimizer)
        optimizer.step(**kwargs)
        return result

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip the norm of the gradients over all ranks."""
        boosted_in(optimizer).clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element of the gradients."""
        boosted_in(optimizer).clip_grad_value_(clip_val)


_STATE, _FILE, _FURTHER = "booster", "lightning.ckpt", "optimizer_{}"


@dataclass(frozen=True)
class CheckpointFolder:
    """Writes and reads checkpoints that open under any layout."""

    booster: Booster
    io: Any
    writes: bool  # whether this rank writes what all ranks have
    barrier: Callable[[], None]

    def save(self, path: Any, model: nn.Module | None, optimizers: Sequence[Any], rest: dict[str, Any]) -> None:
        """Write model, optimizers and `rest` (what Lightning saves) under a temporary name, then rename it."""
        final, optimizers = _local(path), [boosted_in(each) for each in optimizers]
        made = final.with_name(f".{final.name}.unfinished")
        if self.writes:
            shutil.rmtree(made, ignore_errors=True)
        self.barrier()
        if model is not None:
            first = {"optimizer": optimizers[0]} if optimizers else {}
            self.booster.save_checkpoint(made / _STATE, model=model, **first)
            for number, optimizer in enumerate(optimizers[1:], start=1):
                self.booster.save_optimizer(optimizer, made / _FURTHER.format(number))
        if self.writes:
            self.io.save_checkpoint(rest, made / _FILE)
            if final.is_file():
                final.unlink()
            shutil.rmtree(final, ignore_errors=True)
            made.rename(final)
        self.barrier()

    def rest(self, path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read what Lightning saved; raises ConfigurationError if there is no such checkpoint."""
        folder = _local(path)
        if not (folder / _FILE).is_file():
            problem = "is a file of plain Lightning" if folder.is_file() else "is no checkpoint of this strategy"
            raise ConfigurationError(
                f"{folder} {problem}; give the folder that trainer.save_checkpoint() or fabric.save() wrote, or load "
                "weights into the model before training, without ckpt_path"
            )
        try:
            with refuses_code(str(folder / _FILE)):
                return self.io.load_checkpoint(folder / _FILE, weights_only=weights_only)
        except WeightFileError as error:
            raise ConfigurationError(str(error)) from None

    def load(self, path: Any, model: nn.Module | None, optimizers: Sequence[Any]) -> None:
        """Load the states of a model and its optimizers; raises ConfigurationError if they are of another model."""
        folder, optimizers = _local(path), [boosted_in(each) for each in optimizers]
        if model is None and not optimizers:
            return
        objects = {} if model is None else {"model": model}
        if optimizers:
            objects["optimizer"] = optimizers[0]
        self.booster.load_checkpoint(folder / _STATE, **objects)
        for number, optimizer in enumerate(optimizers[1:], start=1):
            self.booster.load_optimizer(optimizer, folder / _FURTHER.format(number))


def _local(path: Any) -> Path:
    if "://" in str(path):
        raise ConfigurationError(f"{path} is not a folder that all ranks share; save to a file system")
    return Path(path)


class JobMethods:
    """Methods of a strategy that Trainer and Fabric call with the same arguments.

    Ranks are counted as processes. Values are gathered and reduced over data-parallel replicas: the ranks of one
    replica have the same.
    """

    booster: Booster
    replicas: Replicas
    shares: ReplicaShares
    _num_nodes = 1
    _layer_sync: Any = None

    def _join(self, plugin: Plugin | None) -> None:
        """Join the job; raises ConfigurationError if `plugin` is missing."""
        if plugin is None:
            raise ConfigurationError(
                "HybridParallelStrategy() got no plugin; give the layout, as in plugin=HybridParallelPlugin(tp_size=2)"
            )
        launch_from_torch(seed=None)
        self.replicas = Replicas(plugin)
        join_metrics(self.replicas)
        self.booster = Booster(plugin=plugin)
        self.shares = ReplicaShares(self.replicas)
        place = place_from_environment(os.environ)
        self._local_rank = place.local_rank if place.world_size == self.world_size else self.global_rank
        rank_zero_only.rank = self.global_rank  # loggers and progress bars are those of one rank

    # ----- where this rank is -----

    @property
    def world_size(self) -> int:
        """Number of ranks, of all replicas."""
        return dist.get_world_size()

    @property
    def global_rank(self) -> int:
        """Rank of this process in the job."""
        return dist.get_rank()

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self._local_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the rank that logs and writes what all ranks have."""
        return self.global_rank == 0

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
        kind = self.booster.plugin.mesh.device_type
        return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.cuda.current_device())

    @property
    def num_nodes(self) -> int:
        """Number of machines, as Trainer and Fabric count them."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def is_distributed(self) -> bool:
        """Whether `self.log(..., sync_dist=True)` reduces over replicas."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> None:
        """Return None: loaders are shared out by `process_dataloader`."""
        return None

    def _configure_launcher(self) -> None:
        """Start no processes: `booster run` or torchrun has; check that Trainer or Fabric counts the same."""
        checks.check_devices(self)

    def setup_environment(self) -> None:
        """Prepare this rank's device."""
        self.accelerator.setup_device(self.root_device)

    @property
    def checkpoint_folder(self) -> CheckpointFolder:
        """What writes and reads checkpoints, with Lightning's writer of a file."""
        return CheckpointFolder(self.booster, self.checkpoint_io, self.is_global_zero, self.barrier)

    # ----- data -----

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader of this replica's share of each global batch; with replicas, of torch's loaders alone."""
        if not isinstance(dataloader, DataLoader):
            if self.replicas.size > 1:
                raise ConfigurationError(
                    f"a {type(dataloader).__name__} cannot be shared out to {self.replicas.size} replicas; give a "
                    "torch.utils.data.DataLoader"
                )
            return dataloader
        added = getattr(dataloader.worker_init_fn, "keywords", {})
        if "rank" in added and added["rank"] != self.replicas.rank:  # Fabric's, which seeds workers by rank
            dataloader.worker_init_fn = None
        _auto_add_worker_init_fn(dataloader, self.replicas.rank)
        return self.booster.boost(dataloader)

    # ----- values of all ranks -----

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor reduced over replicas; a mean counts each replica by its samples of the batch under way.

        Args:
            group: process group; None, or Fabric's default, which is the group of all ranks, for the replicas.
            reduce_op: "mean", "sum", "max", "min", "product", or torch's `ReduceOp`.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        group = self.replicas.mesh.get_group() if _is_everyone(group) else group
        name = str(getattr(reduce_op, "name", reduce_op) or "mean").upper()
        reduced = tensor.clone()
        if name not in ("MEAN", "AVG"):
            dist.all_reduce(reduced, op=getattr(dist.ReduceOp, name), group=group)
            return reduced
        if not reduced.is_floating_point():
            reduced = reduced.to(torch.get_default_dtype())
        reduced = self.shares.weighted(reduced)
        dist.all_reduce(reduced, group=group)
        return reduced / dist.get_world_size(group)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """See `reduce`."""
        return self.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all replicas, of one shape, stacked along a new first dim; of one, itself."""
        if _is_everyone(group) and self.replicas.size == 1:
            return tensor
        if _is_everyone(group):
            shapes = self.replicas.gather_objects([list(tensor.shape)])
            if any(shape != shapes[0] for shape in shapes):
                raise ConfigurationError(
                    f"all_gather got tensors of the shapes {shapes}, one for each replica; pad them to one shape, or "
                    "use drop_last=True"
                )
            group = self.replicas.mesh.get_group()
        return _all_gather_ddp_if_available(tensor, group, sync_grads)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        dist.barrier(world_group())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object: a plain value, tensor, or container of them; anything else is refused."""
        is_source, said = self.global_rank == src, {}
        if is_source and isinstance(obj, Tensor):
            said = {"shape": list(obj.shape), "dtype": str(obj.dtype).removeprefix("torch.")}
        elif is_source:
            try:
                said = {"value": to_json(obj, "the object")}
            except ValueError as error:
                said = {"problem": str(error)}
        said = broadcast_json(said, source=src)
        if "problem" in said:
            raise ConfigurationError(f"broadcast() cannot send this: {said['problem']}")
        if "value" in said:
            return from_json(said["value"])
        value = obj.detach().cpu() if is_source else torch.empty(said["shape"], dtype=getattr(torch, said["dtype"]))
        value = value.contiguous()
        dist.broadcast(value, src, group=world_group())
        return value.to(self.root_device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any rank, decide so."""
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX, group=world_group())
        return bool(votes)

    # ----- the end -----

    def teardown(self) -> None:
        """Leave model, optimizers and environment as they are: WORLD_SIZE is the launcher's."""
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _is_everyone(group: Any) -> bool:
    return group is None or group is dist.group.WORLD
