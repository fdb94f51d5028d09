"""Checkpoints on disk, and snapshots in the memory of machines from which an elastic job resumes under any layout."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from torch.distributed import ProcessGroup
from torch.utils.data import BatchSampler

from booster import failure
from booster.elastic.job_environment import ElasticPlace
from booster.errors import ConfigurationError
from booster.launch import elastic_place, job_store, machine_of_this_rank
from plugins.hybrid_parallel.checkpoint.io import HybridParallelCheckpointIO
from plugins.hybrid_parallel.checkpoint.state.global_tensor import GlobalTensor, TensorChunk
from plugins.hybrid_parallel.checkpoint.state.manifest import Manifest, chunk_key, merge_tensors
from plugins.hybrid_parallel.checkpoint.state.model_state import buffers_of_earlier_stages
from plugins.hybrid_parallel.checkpoint.state.optimizer_state import merge_numbers
from plugins.hybrid_parallel.checkpoint.state.retention import MANIFEST
from plugins.hybrid_parallel.checkpoint.state.training_state import restore, take_snapshot
from plugins.hybrid_parallel.data.dataloader import ShardedDataLoader
from plugins.hybrid_parallel.data.sharded_sampler import DataParallelBatchSampler
from plugins.hybrid_parallel.distributed.agreement import all_gather_json, raise_on_all_ranks
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.elastic.layouts import PlansAhead, StepBoundary
from plugins.hybrid_parallel.elastic.snapshot_files import (
    FoundSnapshot,
    Neighbours,
    Piece,
    newest_snapshot,
    pieces_in,
    remove_before,
    write_piece,
)
from plugins.hybrid_parallel.guards import check_boosted
from plugins.hybrid_parallel.relayout.exchange import Exchange
from shardformer.distributed.process_groups import message_group, world_group
from shardformer.utils.typed_json import from_json


def restore_snapshot(found: FoundSnapshot, mesh: HybridMesh, objects: dict[str, Any], group: ProcessGroup) -> None:
    """Replace the state of boosted objects by that of a snapshot; all ranks must call this together.

    Args:
        found: the snapshot.
        mesh: mesh of ranks.
        objects: objects to restore, by kind.
        group: CPU group of all ranks.

    Raises:
        ConfigurationError: the snapshot is of other objects.
    """
    state = dict(found.state)
    if state["optimizer"] is not None:
        state["optimizer"] = {**state["optimizer"], **merge_numbers([each["numbers"] for each in found.headers])}
    manifest = Manifest(0, {}, merge_tensors([each["tensors"] for each in found.headers]), state)
    # A rank of the machine reads what others of it hold, from the same memory.
    sources = {str(piece.rank): ranks for piece, ranks in zip(found.pieces, found.holders, strict=True)}
    exchange = Exchange(_held(found), manifest, mesh.device, message_group(world_group()), sources)
    restore(mesh, objects, exchange.fill, manifest, group)


def _held(found: FoundSnapshot) -> dict[str, GlobalTensor]:
    """Map the pieces on this machine into memory, as rectangles of whole tensors."""
    chunks: dict[str, list[TensorChunk]] = defaultdict(list)
    for piece, header in zip(found.pieces, found.headers, strict=True):
        if piece not in found.here:
            continue
        with safe_open(piece.data_in(found.here[piece]), framework="pt") as file:
            for name, (_, _, rectangles) in header["tensors"].items():
                for offsets, sizes, *_ in rectangles:
                    values = file.get_tensor(chunk_key(name, offsets))
                    chunks[name].append(TensorChunk(tuple(offsets), tuple(sizes), values))
    shapes = {name: tensor[0] for header in found.headers for name, tensor in header["tensors"].items()}
    return {name: GlobalTensor(shapes[name], parts[0].values.dtype, parts) for name, parts in chunks.items()}


def keep_global_batch(loader: Any, saved: dict[str, Any] | None) -> None:
    """Have a loader yield the global batches of a saved one, if its own differ.

    A script that gives each replica a constant number of samples has other global batches under another number of
    replicas.

    Raises:
        ConfigurationError: the replicas cannot share the global batch, or the loader's batches cannot be changed.
    """
    if saved is None or not isinstance(loader, ShardedDataLoader) or loader.batch_size is None:
        return
    size, replicas = saved["global_batch_size"], loader.global_batch_size // loader.batch_size
    if size == loader.global_batch_size:
        return
    if size % replicas:
        raise ConfigurationError(
            f"dp_size={replicas} does not divide the global batch of {size} samples, with which the job began; use a "
            "layout whose dp_size divides it"
        )
    sampler = loader.batch_sampler
    if not isinstance(sampler, DataParallelBatchSampler) or type(sampler.batch_sampler) is not BatchSampler:
        raise ConfigurationError(
            f"the job began with a global batch of {size} samples, and this loader has {loader.global_batch_size}; "
            f"make it with batch_size={size} // plugin.dp_size"
        )
    loader.batch_size, loader.global_batch_size = size // replicas, size
    sampler.batch_size = loader.batch_size
    sampler.batch_sampler = BatchSampler(sampler.sampler, loader.batch_size, sampler.drop_last)


_MEMORY = "memory:"  # begins the names of snapshots, where a checkpoint has its path


class MemoryCheckpointIO(HybridParallelCheckpointIO):
    """Adds snapshots in memory to checkpoints on disk; a job resumes from the newer of the two.

    Args:
        mesh: mesh of ranks.
        plans: layouts for other numbers of ranks, in an elastic job.
    """

    def __init__(self, mesh: HybridMesh, plans: PlansAhead | None = None) -> None:
        super().__init__(mesh)
        self._plans = plans or PlansAhead()
        self._number = 0  # of the last snapshot
        self._round: _SnapshotRound | None = None
        self._is_first = True

    @failure.guard("booster.snapshot")
    def snapshot(self, folder: str, objects: dict[str, Any], extra: dict[str, Any]) -> None:
        """Leave the training state in the memory of the machines; the next round of an elastic job goes on from it.

        Args:
            folder: folder of the checkpoints.
            objects: objects to save, by kind ("model", "optimizer", "lr_scheduler", "dataloader").
            extra: additional values of the user.

        Raises:
            ConfigurationError: the arguments are invalid, gradients are accumulated, or the memory is full.
        """
        place = elastic_place()
        if place is None:
            return
        check_boosted(objects)
        optimizer = objects.get("optimizer")
        if optimizer is not None:
            optimizer.refuse_accumulated()
        previous = self._number
        if self._round is None:
            self._round = _SnapshotRound(place, objects, self.mesh, self.group)
            self._number = max(self._number, self._round.highest)
            place.set_folder(Path(folder).resolve())
        self._number += 1
        state = take_snapshot(self.mesh, objects, extra, self._round.elsewhere)
        header = {"numbers": state.numbers, "state": state.state, "plans": self._plans.known()}
        self._round.write(self._number, previous, state.tensors, header)
        if self._is_first:
            self._is_first = False
            place.note("first_step", rank=dist.get_rank(), number=self._number)
            place.tell_modules(_installed_modules(dict(sys.modules)))
        self._plans.begin(objects.get("model"), objects.get("dataloader"))
        self._round.boundary.pass_or_leave(self._number)

    def load_checkpoint(self, directory: str, objects: dict[str, Any], resume: str | None = None) -> dict[str, Any]:
        """Read a checkpoint, or the newest snapshot in memory if it is newer."""
        is_named = str(directory).startswith(_MEMORY)
        found = newest_snapshot(None if is_named else Path(directory), self.group) if is_named or resume else None
        if found is None or (not is_named and self._is_older(found, Path(directory))):
            if is_named:
                raise ConfigurationError(f"the snapshot {directory} does not exist any more; give resume='latest'")
            return super().load_checkpoint(directory, objects, resume)
        return self._load(found, objects)

    def latest_checkpoint(self, folder: str) -> str | None:
        """Return the newest checkpoint in a folder, or the name of the newest snapshot in memory if it is newer."""
        found = newest_snapshot(Path(folder), self.group)
        if found is None or self._is_older(found, Path(folder)):
            return super().latest_checkpoint(folder)
        return f"{_MEMORY}{found.number}"

    @failure.guard("booster.load_checkpoint")
    def _load(self, found: FoundSnapshot, objects: dict[str, Any]) -> dict[str, Any]:
        check_boosted(objects)
        loader, model = objects.get("dataloader"), objects.get("model")
        raise_on_all_ranks(lambda: keep_global_batch(loader, found.state["dataloader"]), self.group)
        with nullcontext() if model is None else model.gathers.changing():
            restore_snapshot(found, self.mesh, objects, self.group)
        self._number = found.number
        place = elastic_place()
        if place is not None:
            place.note("moved", rank=dist.get_rank(), number=found.number)
        return from_json(found.state["extra"])

    def _is_older(self, found: FoundSnapshot, folder: Path) -> bool:
        """Return whether the newest checkpoint on disk has more steps than a snapshot."""
        path = super().latest_checkpoint(str(folder))
        if path is None:
            return False
        on_disk = self._from_first(lambda: Manifest.read(Path(path) / MANIFEST).state["step"], self.group)
        return (on_disk or 0) > (found.state["step"] or 0)


class _SnapshotRound:
    """What the snapshots of one round have in common.

    Args:
        place: place of this rank in its elastic job.
        objects: objects that are saved, by kind.
        mesh: mesh of ranks.
        group: CPU group of all ranks.

    Attributes:
        elsewhere: buffers that another stage writes.
        boundary: where all ranks leave together.
        highest: number of the newest snapshot that is left anywhere of earlier rounds, complete or not.
    """

    def __init__(
        self, place: ElasticPlace, objects: dict[str, Any], mesh: HybridMesh, group: dist.ProcessGroup
    ) -> None:
        self._place, self._rank, self._world_size = place, dist.get_rank(), dist.get_world_size()
        model = objects.get("model")
        self.elsewhere = set() if model is None else buffers_of_earlier_stages(model, mesh, group)
        found = max((piece.number for piece in pieces_in(place.pieces)), default=0)
        names, numbers = zip(*all_gather_json([machine_of_this_rank(), found], group), strict=True)
        self._neighbours = Neighbours([names.index(name) for name in names], group)
        self.highest = max(numbers)
        self.boundary = StepBoundary(place, job_store(), self._rank)

    def write(self, number: int, previous: int, tensors: dict[str, Any], header: dict[str, Any]) -> None:
        """Write a piece and its copy.

        All ranks have written the snapshot `previous`, or gone on from it: none can finish a step without the others.
        """
        directory = self._place.pieces
        remove_before(previous, directory)
        piece = Piece(number, self._place.round, self._world_size, self._rank)
        write_piece(piece, directory, tensors, header)
        self._neighbours.exchange(piece, directory)


def _installed_modules(modules: dict[str, ModuleType]) -> Iterator[str]:
    """Yield the modules of installed packages and of this one, in the order in which they were imported."""
    ours = Path(__file__).resolve().parents[3]
    for name, module in modules.items():
        file = getattr(module, "__file__", None) or ""
        is_ours = file.startswith(str(ours)) and name.partition(".")[0] in ("booster", "plugins", "shardformer")
        if is_ours or "site-packages" in file:
            yield name
