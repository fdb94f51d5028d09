"""Writing and reading of rectangles of tensors: in safetensors files, or in the memory of all ranks, under any layout.

Every chunk has exactly one owner by construction, so each rank plans and writes by itself. What was written is
described as JSON. A rank reads the parts of chunks that overlap its rectangles, which `read_from_ranks` sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint.global_tensor import GlobalTensor, TensorChunk
from plugins.hybrid_parallel.checkpoint.tensor_file import (
    Chunk,
    Manifest,
    TensorFileReader,
    TensorFileWriter,
    chunk_key,
    for_each,
)
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from shardformer.distributed.process_groups import all_gather_json, message_group, world_group

# What a rank wrote, as JSON: name -> [shape, dtype, [[offsets, sizes, file, checksum], ...]].
WrittenTensors = dict[str, list[Any]]
Ints = tuple[int, ...]


class Read(NamedTuple):
    """A part of a chunk that fills a part of a rectangle."""

    name: str  # of the whole tensor
    chunk: Chunk
    start: Ints  # position in the chunk
    into: Tensor  # memory of the part

    def run(self, file: TensorFileReader) -> None:
        """Read the part from the file of its chunk."""
        with torch.no_grad():  # grad mode is thread-local
            file.read(self.chunk.key(self.name), self.start, self.into.shape, self.into)


def write_tensors(tensors: Mapping[str, GlobalTensor], path: Path) -> WrittenTensors:
    """Write this rank's rectangles to one safetensors file (or raise OSError); return their description."""
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.rectangles}
    chunks = {chunk_key(name, each.offsets): each for name, tensor in tensors.items() for each in tensor.rectangles}
    dtypes = (tensor.dtype for tensor in tensors.values() for _ in tensor.rectangles)
    entries = {key: (dtype, each.sizes) for (key, each), dtype in zip(chunks.items(), dtypes, strict=True)}
    with TensorFileWriter(path, entries) as file:
        checksums = {key: file.write(key, each.values) for key, each in chunks.items()}
    return _described(tensors, lambda name, each: [path.name, checksums[chunk_key(name, each.offsets)]])


def describe_tensors(tensors: Mapping[str, GlobalTensor], file: str) -> WrittenTensors:
    """Return the description of rectangles that are in memory, as `write_tensors` would, with `file` as their file."""
    return _described(tensors, lambda _, each: [file, 0])


def _described(tensors: Mapping[str, GlobalTensor], place: Callable[[str, TensorChunk], list[Any]]) -> WrittenTensors:
    return {
        name: [
            list(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            [[list(each.offsets), list(each.sizes), *place(name, each)] for each in tensor.rectangles],
        ]
        for name, tensor in tensors.items()
    }


def read_tensors(tensors: Mapping[str, GlobalTensor], directory: Path, manifest: Manifest) -> None:
    """Fill rectangles from a checkpoint of any layout; ConfigurationError if it does not cover them."""
    files: dict[str, list[Read]] = {}
    for read in plan_reads(tensors, manifest):
        files.setdefault(read.chunk.file, []).append(read)
    for name, reads in files.items():
        with TensorFileReader(directory / name) as file:
            for_each(lambda read, file=file: read.run(file), reads)


def plan_reads(tensors: Mapping[str, GlobalTensor], manifest: Manifest) -> list[Read]:
    """Return the parts of chunks that fill rectangles; ConfigurationError if the manifest does not cover them."""
    return [read for name, tensor in tensors.items() for read in _reads(name, tensor, manifest)]


def _reads(name: str, tensor: GlobalTensor, manifest: Manifest) -> list[Read]:
    saved = manifest.tensors.get(name)
    if saved is None or saved.shape != tensor.shape:
        found = "is missing" if saved is None else f"has shape {saved.shape}"
        raise ConfigurationError(
            f"{name} {found} in the checkpoint, the model has {tensor.shape}; "
            "load a checkpoint of the same configuration"
        )
    reads = [
        read
        for each in tensor.rectangles
        for chunk in saved.chunks
        if (read := _overlap(name, each, chunk)) is not None
    ]
    if sum(read.into.numel() for read in reads) != sum(each.values.numel() for each in tensor.rectangles):
        raise ConfigurationError(f"{name} has holes in the checkpoint: not all ranks' parts of it were saved")
    return reads


def _overlap(name: str, rectangle: TensorChunk, chunk: Chunk) -> Read | None:
    """Return the part of a chunk that is in a rectangle; None if there is none."""
    into, starts = rectangle.values, []
    for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        first = max(offset, rectangle.offsets[dim])
        length = min(offset + size, rectangle.offsets[dim] + rectangle.sizes[dim]) - first
        if length <= 0:
            return None
        into = into.narrow(dim, first - rectangle.offsets[dim], length)
        starts.append(first - offset)
    return Read(name, chunk, tuple(starts), into)


_ROUND_BYTES = 64 * 2**20  # that all ranks together move at once


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
    asked = [[read.name, list(read.chunk.offsets), list(read.start), list(read.into.shape)] for read in reads]
    files = {(name, each.offsets): each.file for name, tensor in manifest.tensors.items() for each in tensor.chunks}
    moves = []
    for target, parts in enumerate(all_gather_json(asked)):
        for number, (name, offsets, start, sizes) in enumerate(parts):
            chunk, dtype = tuple(offsets), manifest.tensors[name].torch_dtype
            ranks = holders[files[name, chunk]]
            source = target if target in ranks else ranks[target % len(ranks)]
            moves.append(_Move(name, chunk, target, number, source, tuple(start), tuple(sizes), dtype))
    for moved in _rounds(sorted(moves, key=lambda move: move[:4])):
        _exchange(moved, held, [read.into for read in reads], device)


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
