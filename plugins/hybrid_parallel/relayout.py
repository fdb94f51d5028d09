"""`booster.relayout`: the training objects of a running job under another layout, with the state of the present ones.

Each rank copies what it would write to a checkpoint to host memory. The modules of the whole model, without values, are
cut for the new layout as at `boost`. Then the state is restored from those copies, as at the load of a checkpoint.
"""

from __future__ import annotations

import copy
import gc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from booster.errors import ConfigurationError
from booster.plugin import Plugin, TrainingObjects
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.checkpoint.atomic_save import Staging
from plugins.hybrid_parallel.checkpoint.dcp_storage import describe_tensors, read_from_ranks
from plugins.hybrid_parallel.checkpoint.global_tensor import buffers_of_earlier_stages
from plugins.hybrid_parallel.checkpoint.tensor_file import Manifest
from plugins.hybrid_parallel.checkpoint.training_state import StateSnapshot, manifest_of, restore, take_snapshot
from plugins.hybrid_parallel.data.dataloader import LOADER_OPTIONS, ShardedDataLoader
from plugins.hybrid_parallel.data.random_stream import LoadingStream
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.distributed.mesh import HybridMesh, control_group
from plugins.hybrid_parallel.guards import check_boosted_model, check_boosted_optimizer, release
from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer
from shardformer.distributed.process_groups import all_gather_json
from shardformer.lazy import empty_copy, set_weight_reader
from shardformer.shard_spec import ShardSpec
from shardformer.utils.freed_memory import return_freed_memory


def relayout(mesh: HybridMesh, plugin: Plugin, objects: TrainingObjects) -> TrainingObjects:
    """Return objects under the layout of `plugin` that continue the training of `objects`; these end.

    Args:
        mesh: the present grid of ranks.
        plugin: a plugin for the same ranks.
        objects: what `boost` returned: the model with all of its optimizers; schedulers and loaders.

    Raises:
        ConfigurationError: the objects cannot move, there is no memory for their state, or the model does not allow
            the layout; raised on all ranks, and training can continue under the present layout.
    """
    raise_on_all_ranks(lambda: _check(objects, plugin), control_group())
    model, optimizers, is_training = objects.model, list(objects.optimizers), objects.model.training
    states = _states_of(model, optimizers, mesh)
    whole, loaders = _whole_model(model), [loader_for(each, plugin.dp_size) for each in objects.dataloaders]
    users = [optimizer.unwrap() for optimizer in optimizers]
    with LoadingStream().active(), _pointing_at(whole, optimizers):
        made = plugin.configure(TrainingObjects(whole, users, objects.lr_schedulers, loaders, objects.criterion))
    _release_shared_memory(model)
    release(model)
    gc.collect()  # the modules and parameters of a model refer to each other
    return_freed_memory()
    for index, optimizer in enumerate(made.optimizers or [None]):
        _restore(plugin.grid, made.model if index == 0 else None, optimizer, *states.pop(0))
    return_freed_memory()
    for new, old in zip(made.dataloaders, objects.dataloaders, strict=True):
        new.load_state_dict(old.state_dict())
    made.model.training = is_training
    for scheduler in objects.lr_schedulers:
        _follow(scheduler, dict(zip(map(id, optimizers), made.optimizers, strict=True)))
    return made


def _check(objects: TrainingObjects, plugin: Plugin) -> None:
    """Refuse objects whose state is not complete, or cannot be moved, before anything is changed."""
    if objects.model is None:
        raise ConfigurationError("relayout() got no model; give the model that boost() returned, with its optimizers")
    check_boosted_model(objects.model)
    for optimizer in objects.optimizers:
        check_boosted_optimizer(optimizer)
    model: HybridParallelModel = objects.model
    missing = [each for each in model.optimizers if all(each is not given for given in objects.optimizers)]
    if missing or len(objects.optimizers) != len(model.optimizers):
        raise ConfigurationError(
            f"relayout() got {len(objects.optimizers)} of the {len(model.optimizers)} optimizers that were boosted "
            "with the model; give all of them"
        )
    if isinstance(model.origin.modules, str):
        raise ConfigurationError(
            f"relayout() cannot build this {type(model.module).__name__} again: {model.origin.modules}; save a "
            "checkpoint, and load it under the other layout"
        )
    for optimizer in objects.optimizers:
        _check_optimizer(optimizer)
    for loader in objects.dataloaders:
        check_loader(loader, plugin.dp_size)


def _check_optimizer(optimizer: HybridParallelOptimizer) -> None:
    optimizer.refuse_accumulated()
    if optimizer.averages:
        raise ConfigurationError(
            f"relayout() does not move the average {next(iter(optimizer.averages))!r} of the weights (ShardedEMA); "
            "save a checkpoint, and load it under the other layout"
        )


def _states_of(
    model: HybridParallelModel, optimizers: Sequence[HybridParallelOptimizer], mesh: HybridMesh
) -> list[tuple[StateSnapshot, Manifest]]:
    """Return copies of the states of the model with its first optimizer, and of each further optimizer."""
    for optimizer in optimizers:
        optimizer.wait_for_parameters()
    elsewhere = buffers_of_earlier_stages(model, mesh, control_group())

    def copies() -> list[StateSnapshot]:
        first, *others = optimizers or [None]
        found = [take_snapshot(mesh, {"model": model, "optimizer": first}, {}, elsewhere)]
        found += [take_snapshot(mesh, {"optimizer": each}, {}, ()) for each in others]
        return [Staging().copy(each) for each in found]

    rank = str(dist.get_rank())  # named instead of a file: who has a chunk
    states = raise_on_all_ranks(copies, control_group())
    parts = [all_gather_json([describe_tensors(each.tensors, rank), each.numbers]) for each in states]
    return [(each, manifest_of(each.state, part)) for each, part in zip(states, parts, strict=True)]


def _release_shared_memory(model: HybridParallelModel) -> None:
    """Give back the memory of the present layout that the ranks of a machine share, which outlives its tensors."""
    for bucket in (bucket for optimizer in model.optimizers for bucket in optimizer.buckets):
        flat, exchange = bucket.flat if bucket.sharded is None else bucket.sharded.shard, bucket.options.exchange
        if (bucket.sharded is None or exchange.shard_memory is None) and not flat.untyped_storage().resizable():
            exchange.release(flat)


def _restore(
    mesh: HybridMesh,
    model: HybridParallelModel | None,
    optimizer: HybridParallelOptimizer | None,
    state: StateSnapshot,
    manifest: Manifest,
) -> None:
    """Restore new objects from copies in the memory of all ranks."""
    held = {(name, each.offsets): each.values for name, tensor in state.tensors.items() for each in tensor.rectangles}
    holders = {str(rank): [rank] for rank in range(dist.get_world_size())}
    fill = partial(read_from_ranks, held=held, holders=holders, manifest=manifest, device=mesh.device)
    objects = {"model": model, "optimizer": optimizer}
    with nullcontext() if model is None else model.gathers.changing():
        restore(mesh, objects, fill, manifest, control_group(), with_random=model is not None)


def _whole_model(model: HybridParallelModel) -> nn.Module:
    """Return the whole model without values, with the present modes, options and frozen parameters."""
    whole, here = empty_copy(model.origin.modules), model.unwrap()
    for name in ("config", "generation_config"):
        if getattr(here, name, None) is not None:
            _take_options(getattr(whole, name), getattr(here, name))
    modes = {name: each.training for name, each in here.named_modules()}
    trained = {name: each.requires_grad for name, each in here.named_parameters(remove_duplicate=False)}
    parts = all_gather_json([[name for name in modes if not modes[name]], trained])
    evaluated = {name for names, _ in parts for name in names}
    requires = {name: value for _, each in parts for name, value in each.items()}
    for name, module in whole.named_modules():
        module.training = name not in evaluated
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(requires.get(name, parameter.requires_grad))
    dtypes = {name: each.dtype for name, each in whole.named_parameters(remove_duplicate=False)}

    def without_values(name: str, spec: ShardSpec) -> torch.Tensor:
        return torch.empty(spec.local_shape, dtype=dtypes[name])

    set_weight_reader(whole, without_values)
    return whole


def _take_options(config: Any, present: Any) -> None:
    """Set in a configuration, and in those inside it, what a script has set in the present one."""
    for name, value in vars(present).items():
        if hasattr(value, "to_dict") and hasattr(inside := getattr(config, name, None), "to_dict"):
            _take_options(inside, value)
        elif not name.startswith("_"):  # names of kernels, which follow the layout
            setattr(config, name, copy.deepcopy(value))


@contextmanager
def _pointing_at(whole: nn.Module, optimizers: Sequence[HybridParallelOptimizer]) -> Iterator[None]:
    """Have the users' optimizers hold the parameters of the whole model; as before if the layout is refused."""
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    before = [
        (each.unwrap(), each.unwrap().state, [group["params"] for group in each.param_groups]) for each in optimizers
    ]
    for optimizer in optimizers:
        optimizer.unwrap().state = defaultdict(dict)
        for group, names in zip(optimizer.param_groups, optimizer.group_names, strict=True):
            group["params"] = [parameters[name] for name in names]
    try:
        yield
    except BaseException:
        for optimizer, state, groups in before:
            optimizer.state = state
            for group, params in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = params
        raise


def _follow(scheduler: Any, moved: dict[int, Any]) -> None:
    """Have a scheduler that was made from a boosted optimizer, and those inside of it, refer to the new one."""
    for each in (scheduler, *getattr(scheduler, "_schedulers", ())):
        if id(getattr(each, "optimizer", None)) in moved:
            each.optimizer = moved[id(each.optimizer)]


# ----- data loaders: the same global batches, from the same position -----


def check_loader(loader: DataLoader, dp_size: int) -> None:
    """Refuse a loader whose global batches `dp_size` replicas cannot share."""
    if not isinstance(loader, ShardedDataLoader):
        raise ConfigurationError(
            f"relayout() got a plain {type(loader).__name__}, which cannot say where it is in its epoch; give the "
            "loader that boost() returned"
        )
    if loader.global_batch_size % dp_size:
        raise ConfigurationError(
            f"dp_size={dp_size} does not divide the global batch of {loader.global_batch_size} samples, which "
            "relayout() keeps; use a layout whose dp_size divides it"
        )
    if loader.batch_size != _batch_size(loader, dp_size) and not _is_plain(loader.given):
        raise ConfigurationError(
            f"relayout() cannot change the batch_size={loader.batch_size} of a loader with a batch sampler of its own; "
            "keep dp_size, or boost a loader with batch_size"
        )


def loader_for(loader: ShardedDataLoader, dp_size: int) -> DataLoader:
    """Return the user's loader with a batch size by which `dp_size` replicas have the same global batches."""
    given, batch_size = loader.given, _batch_size(loader, dp_size)
    if batch_size == loader.batch_size:
        return given
    options = {name: getattr(given, name) for name in ("generator", *LOADER_OPTIONS) if hasattr(given, name)}
    if not isinstance(given.dataset, IterableDataset):
        options["sampler"] = given.sampler
    return DataLoader(given.dataset, batch_size=batch_size, drop_last=given.drop_last, **options)


def _batch_size(loader: ShardedDataLoader, dp_size: int) -> int | None:
    return None if loader.batch_size is None else loader.global_batch_size // dp_size


def _is_plain(given: DataLoader) -> bool:
    """Return whether torch made the batch sampler from `batch_size`."""
    return given.batch_size is not None and (
        isinstance(given.dataset, IterableDataset) or type(given.batch_sampler) is BatchSampler
    )
