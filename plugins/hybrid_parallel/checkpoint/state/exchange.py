"""Training states in the memory of ranks: each rank gets the rectangles that it needs from the ranks that have them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from plugins.hybrid_parallel.checkpoint.state.dcp_storage import plan_reads
from plugins.hybrid_parallel.checkpoint.state.global_tensor import GlobalTensor
from plugins.hybrid_parallel.checkpoint.state.manifest import Manifest
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from shardformer.distributed.process_groups import all_gather_json, message_group, world_group

_ROUND_BYTES = 64 * 2**20  # that all ranks together move at once

Ints = tuple[int, ...]


class _Move(NamedTuple):
    """A part of a chunk that goes from one rank to another.

    Attributes:
        name: of the whole tensor.
        chunk: offsets of the chunk in the whole tensor.
        target: the rank that needs the part.
        number: index among the parts that the target asks for.
        source: the rank that has it.
        start, sizes: position in the chunk, and shape.
        dtype: of the chunk.
    """

    name: str
    chunk: Ints
    target: int
    number: int
    source: int
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
        manifest: describes all chunks.
        device: of messages.

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
