"""`torch.distributed.checkpoint` (DCP) over safetensors files: its planning and resharding, without pickle.

DCP's own file storage writes its index as a pickle, and its coordination sends pickled plans between ranks. Here each
rank plans and writes by itself (`no_dist`): every chunk has exactly one owner by construction, so no agreement is
needed beforehand. The descriptions of what was written are sent as JSON afterwards.

`read_from_ranks` reads from the memory of all ranks instead of files, planned in the same way: it costs them messages.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint.global_tensor import GlobalTensor
from plugins.hybrid_parallel.checkpoint.tensor_file import (
    Manifest,
    TensorFileReader,
    TensorFileWriter,
    chunk_key,
    for_each,
)
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from shardformer.distributed.process_groups import all_gather_json, message_group, world_group

# The warning does not apply: every rank plans by itself on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized, assuming")

# What a rank wrote, as JSON: name -> [shape, dtype, [[offsets, sizes, file, checksum], ...]].
WrittenTensors = dict[str, list[Any]]


def write_tensors(tensors: Mapping[str, GlobalTensor], path: Path) -> WrittenTensors:
    """Write this rank's rectangles to one safetensors file (or raise OSError); return their description."""
    writer = _Writer(path)
    _without_wrapping(lambda: dcp.save(dict(tensors), storage_writer=writer, planner=_SavePlanner(), no_dist=True))
    return writer.written


def read_tensors(tensors: Mapping[str, GlobalTensor], directory: Path, manifest: Manifest) -> None:
    """Fill rectangles from a checkpoint of any layout; ConfigurationError if it does not cover them."""
    reader = _Reader(directory, manifest)
    _without_wrapping(lambda: dcp.load(dict(tensors), storage_reader=reader, planner=_LoadPlanner(), no_dist=True))


def describe_tensors(tensors: Mapping[str, GlobalTensor], file: str) -> WrittenTensors:
    """Return the description of rectangles that are in memory, as `write_tensors` would, with `file` as their file."""
    return {
        name: [
            list(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            [[list(each.offsets), list(each.sizes), file, 0] for each in tensor.rectangles],
        ]
        for name, tensor in tensors.items()
    }


def plan_reads(tensors: Mapping[str, GlobalTensor], manifest: Manifest) -> list[tuple[ReadItem, Tensor]]:
    """Return the parts of chunks that fill rectangles, and their memory; refuses uncovered ones."""
    planner = _LoadPlanner()
    planner.set_up_planner(dict(tensors), _metadata_of(manifest))
    return [(item, planner.resolve_tensor(item)) for item in planner.create_local_plan().items]


def _without_wrapping(work: Any) -> None:
    """Run DCP, and raise the original error instead of the `CheckpointException` that hides its message."""
    try:
        work()
    except CheckpointException as wrapped:
        error = next(iter(wrapped.failures.values()))[0]
        raise error from None


class _SavePlanner(SavePlanner):
    """Planner that writes everything it is given: the rectangles of the ranks are disjoint."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.tensors: dict[str, GlobalTensor] = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [item for name, each in self.tensors.items() for item in each.__create_write_items__(name, each)]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.tensors[write_item.index.fqn].__get_tensor_shard__(write_item.index)


class _Writer(StorageWriter):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: WrittenTensors = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        entries = {}
        for item in plan.items:
            data = item.tensor_data
            entries[chunk_key(item.index.fqn, data.chunk.offsets)] = (data.properties.dtype, tuple(data.chunk.sizes))
        results = []
        with TensorFileWriter(self.path, entries) as file:
            for key, item in zip(entries, plan.items, strict=True):
                data, tensor = item.tensor_data, planner.resolve_data(item)
                checksum = file.write(key, tensor)
                chunk = [list(data.chunk.offsets), list(data.chunk.sizes), self.path.name, checksum]
                dtype = str(data.properties.dtype).removeprefix("torch.")
                self.written.setdefault(item.index.fqn, [list(data.size), dtype, []])[2].append(chunk)
                results.append(WriteResult(item.index, tensor.nbytes, None))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _LoadPlanner(LoadPlanner):
    """Planner that reads every rectangle from the chunks that overlap it."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.tensors: dict[str, GlobalTensor] = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for name, each in self.tensors.items() for item in self._reads(name, each)])

    def _reads(self, name: str, tensor: GlobalTensor) -> list[ReadItem]:
        saved = self.metadata.state_dict_metadata.get(name)
        if saved is None or tuple(saved.size) != tensor.shape:
            found = "is missing" if saved is None else f"has shape {tuple(saved.size)}"
            raise ConfigurationError(
                f"{name} {found} in the checkpoint, the model has {tensor.shape}; "
                "load a checkpoint of the same configuration"
            )
        items = create_read_items_for_chunk_list(name, saved, tensor.__create_chunk_list__())
        asked = sum(math.prod(rectangle.sizes) for rectangle in tensor.rectangles)
        if sum(math.prod(item.lengths) for item in items) != asked:
            raise ConfigurationError(f"{name} has holes in the checkpoint: not all ranks' parts of it were saved")
        return items

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise NotImplementedError("a checkpoint holds tensors; everything else is in its manifest")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = self.tensors[read_item.dest_index.fqn].__get_tensor_shard__(read_item.dest_index)
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class _Reader(StorageReader):
    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return _metadata_of(self.manifest)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items: dict[str, list[ReadItem]] = {}  # file -> items to read from it
        for item in plan.items:
            items.setdefault(self._file_of(item.storage_index), []).append(item)
        for name, reads in items.items():
            with TensorFileReader(self.directory / name) as file:
                for_each(partial(_read, file, planner), reads)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _file_of(self, index: MetadataIndex) -> str:
        chunks = self.manifest.tensors[index.fqn].chunks
        return next(chunk.file for chunk in chunks if chunk.offsets == tuple(index.offset))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _metadata_of(manifest: Manifest) -> Metadata:
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=tensor.torch_dtype),
                torch.Size(tensor.shape),
                [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in tensor.chunks],
            )
            for name, tensor in manifest.tensors.items()
        }
    )


@torch.no_grad()  # grad mode is thread-local
def _read(file: TensorFileReader, planner: LoadPlanner, item: ReadItem) -> None:
    target = planner.resolve_tensor(item)
    key = chunk_key(item.storage_index.fqn, item.storage_index.offset)
    file.read(key, item.storage_offsets, item.lengths, target)
    planner.commit_tensor(item, target)


_ROUND_BYTES = 64 * 2**20  # that all ranks together move at once

Ints = tuple[int, ...]


class _Move(NamedTuple):
    """A part of a chunk that goes from one rank to another."""

    name: str  # of the whole tensor
    chunk: Ints  # offsets of the chunk in the whole tensor
    target: int  # the rank that needs the part
    number: int  # index among the parts that the target asks for
    source: int
    # start, sizes: position in the chunk, and shape
    start: Ints
    sizes: Ints
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes that the part takes in a message: the next one begins at a multiple of every element size."""
        return -(-self.nbytes // 16) * 16

    def of(self, chunk: Tensor) -> Tensor:
        """Return the part of its chunk."""
        for dim, (start, size) in enumerate(zip(self.start, self.sizes, strict=True)):
            chunk = chunk.narrow(dim, start, size)
        return chunk


@torch.no_grad()
def read_from_ranks(
    tensors: Mapping[str, GlobalTensor],
    held: Mapping[tuple[str, Ints], Tensor],
    holders: Mapping[str, Sequence[int]],
    manifest: Manifest,
    device: torch.device,
) -> None:
    """Fill rectangles of this rank from the memory of all ranks, which must call this together.

    Args:
        tensors: name -> rectangles to fill.
        held: the chunks that this rank has, by name and offsets in the whole tensor.
        holders: file of a chunk -> ranks that have it.

    Raises:
        ConfigurationError: a tensor is missing, or has another shape; raised on all ranks.
    """
    reads = raise_on_all_ranks(lambda: plan_reads(tensors, manifest))
    asked = [
        [item.storage_index.fqn, list(item.storage_index.offset), list(item.storage_offsets), list(item.lengths)]
        for item, _ in reads
    ]
    files = {(name, each.offsets): each.file for name, tensor in manifest.tensors.items() for each in tensor.chunks}
    moves = []
    for target, parts in enumerate(all_gather_json(asked)):
        for number, (name, offsets, start, sizes) in enumerate(parts):
            chunk, dtype = tuple(offsets), manifest.tensors[name].torch_dtype
            ranks = holders[files[name, chunk]]
            source = target if target in ranks else ranks[target % len(ranks)]
            moves.append(_Move(name, chunk, target, number, source, tuple(start), tuple(sizes), dtype))
    for moved in _rounds(sorted(moves, key=lambda move: move[:4])):
        _exchange(moved, held, [into for _, into in reads], device)


def _rounds(moves: Sequence[_Move]) -> Iterator[list[_Move]]:
    """Split moves into rounds of a bounded size."""
    found: list[_Move] = []
    size = 0
    for move in moves:
        if found and size + move.nbytes > _ROUND_BYTES:
            yield found
            found, size = [], 0
        found.append(move)
        size += move.nbytes
    if found:
        yield found


def _exchange(
    moves: Sequence[_Move], held: Mapping[tuple[str, Ints], Tensor], targets: Sequence[Tensor], device: torch.device
) -> None:
    """Move the parts of a round: one message for each pair of ranks."""
    rank, peers = dist.get_rank(), range(dist.get_world_size())
    for move in moves:
        if move.source == move.target == rank:
            targets[move.number].copy_(move.of(held[move.name, move.chunk]))
    moves = [move for move in moves if move.source != move.target]
    if not moves:
        return
    sent = [[move for move in moves if (move.source, move.target) == (rank, peer)] for peer in peers]
    received = [[move for move in moves if (move.source, move.target) == (peer, rank)] for peer in peers]
    rooms = [[sum(move.room for move in parts) for parts in each] for each in (received, sent)]
    arrived, packed = (torch.empty(sum(each), dtype=torch.uint8, device=device) for each in rooms)
    for move, into in _split(packed, sent):
        into.copy_(move.of(held[move.name, move.chunk]))
    # A group that compares collectives would refuse messages of other sizes.
    dist.all_to_all_single(arrived, packed, *rooms, group=message_group(world_group()))
    for move, values in _split(arrived, received):
        targets[move.number].copy_(values)


def _split(buffer: Tensor, moves: Sequence[Sequence[_Move]]) -> Iterator[tuple[_Move, Tensor]]:
    """Yield each move with its part of a message, in its dtype and shape."""
    start = 0
    for move in (move for parts in moves for move in parts):
        yield move, buffer[start : start + move.nbytes].view(move.dtype).view(move.sizes)
        start += move.room
