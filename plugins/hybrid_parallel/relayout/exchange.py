"""Exchange of rectangles of tensors between the ranks that have them and those that need them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plugins.hybrid_parallel.checkpoint.state.dcp_storage import plan_reads
from plugins.hybrid_parallel.checkpoint.state.global_tensor import GlobalTensor
from plugins.hybrid_parallel.checkpoint.state.manifest import Manifest
from plugins.hybrid_parallel.distributed.agreement import all_gather_json, raise_on_all_ranks
from plugins.hybrid_parallel.zero.bucket import Bucket
from shardformer.utils.freed_memory import FreedMemory


class PresentMemory:
    """Storages of the present weights and optimizer states, each of which is emptied after its last tensor has moved.

    Objects that still refer to an emptied storage cannot be used any more.

    Args:
        held: the rectangles that this rank has, by name.
        freed: names of tensors that are read once; a storage with others is kept. Also an attribute.
        buckets: of the present optimizers.
    """

    def __init__(self, held: Mapping[str, GlobalTensor], freed: Collection[str], buckets: Sequence[Bucket]) -> None:
        self.freed = frozenset(freed)
        self._names: dict[int, set[str]] = defaultdict(set)  # address of a storage -> what it holds
        for name, tensor in held.items():
            for storage in _storages(tensor):
                self._names[storage.data_ptr()].add(name)
        self._kept = {address for address, names in self._names.items() if not names <= self.freed}
        self._flats = [bucket.flat if bucket.sharded is None else bucket.sharded.shard for bucket in buckets]
        self._releases: dict[int, Callable[[], None]] = {
            flat.untyped_storage().data_ptr(): partial(bucket.options.exchange.release, flat)
            for flat, bucket in zip(self._flats, buckets, strict=True)
            if bucket.sharded is None or bucket.options.exchange.shard_file is None
        }
        self._freed = FreedMemory(sum(tensor.nbytes for tensor in self._flats))

    def release_copies(self) -> None:
        """Empty the buckets whose weights other replicas send."""
        for flat in self._flats:
            if flat.untyped_storage().data_ptr() not in self._names:
                self._empty(flat.untyped_storage())

    def release(self, name: str, tensor: GlobalTensor) -> None:
        """Note that a tensor has moved; empty the storages that hold nothing else."""
        for storage in _storages(tensor):
            left = self._names[storage.data_ptr()]
            left.discard(name)
            if not left and storage.data_ptr() not in self._kept:
                self._empty(storage)

    def _empty(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if storage.resizable():
            size = storage.nbytes()
            storage.resize_(0)
            self._freed.add(size)
        elif address in self._releases:  # memory that the ranks of a machine share
            self._releases.pop(address)()


def _storages(tensor: GlobalTensor) -> list[torch.UntypedStorage]:
    values: list[Tensor] = [each.values for each in tensor.rectangles]
    found = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in values}
    return [storage for address, storage in found.items() if address]


_ROUND_BYTES = 64 * 2**20  # that all ranks together move at once

Ints = tuple[int, ...]


@dataclass(frozen=True)
class _Move:
    """A part of a chunk that goes from one rank to another.

    Attributes:
        source, target: ranks.
        name: of the whole tensor.
        chunk: offsets of the chunk in the whole tensor.
        start, sizes: position in the chunk, and shape.
        dtype: of the chunk.
        number: index among the parts that the target asks for.
    """

    source: int
    target: int
    name: str
    chunk: Ints
    start: Ints
    sizes: Ints
    dtype: torch.dtype
    number: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


class Exchange:
    """Reads tensors of a state whose rectangles are in the memory of the ranks.

    Args:
        held: the rectangles that this rank has, by name.
        manifest: describes the rectangles of all ranks; the file of a chunk is the rank that has it.
        device: device of messages.
        group: group of all ranks, for messages on that device.
        sources: file of a chunk -> ranks that have it; None if the file is the rank.
        memory: gives back what has moved; its tensors are removed from `held`.
    """

    def __init__(
        self,
        held: dict[str, GlobalTensor],
        manifest: Manifest,
        device: torch.device,
        group: ProcessGroup,
        sources: Mapping[str, Sequence[int]] | None = None,
        memory: PresentMemory | None = None,
    ) -> None:
        self._held, self._manifest, self._memory = held, manifest, memory
        self._device, self._group = device, group
        self._rank = dist.get_rank()
        self._sources = {
            (name, chunk.offsets): [int(chunk.file)] if sources is None else sources[chunk.file]
            for name, tensor in manifest.tensors.items()
            for chunk in tensor.chunks
        }

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, GlobalTensor]) -> None:
        """Fill rectangles of this rank; all ranks must call this together.

        Raises:
            ConfigurationError: a tensor is missing, or has another shape; raised on all ranks.
        """
        reads = raise_on_all_ranks(lambda: plan_reads(tensors, self._manifest))
        asked = [
            [item.storage_index.fqn, list(item.storage_index.offset), list(item.storage_offsets), list(item.lengths)]
            for item, _ in reads
        ]
        moves = self._moves(all_gather_json(asked))
        left = Counter(move.name for move in moves if move.source == self._rank)
        for moved in _rounds(moves):
            self._move(moved, [into for _, into in reads])
            left.subtract(move.name for move in moved if move.source == self._rank)
            for name in {move.name for move in moved if move.source == self._rank}:
                if not left[name] and self._memory is not None and name in self._memory.freed:
                    self._memory.release(name, self._held.pop(name))

    def _moves(self, asked: Sequence[Sequence[list]]) -> list[_Move]:
        """Return what all ranks asked for, in an order that all ranks agree on."""
        found = []
        for target, parts in enumerate(asked):
            for number, (name, chunk, start, sizes) in enumerate(parts):
                ranks = self._sources[name, tuple(chunk)]
                source = target if target in ranks else ranks[target % len(ranks)]
                dtype = self._manifest.tensors[name].torch_dtype
                found.append(_Move(source, target, name, tuple(chunk), tuple(start), tuple(sizes), dtype, number))
        return _in_step(sorted(found, key=lambda each: (each.name, each.chunk, each.target, each.number)))

    def _move(self, moves: Sequence[_Move], targets: Sequence[Tensor]) -> None:
        """Move the parts of a round: one message for each pair of ranks."""
        sent, received = defaultdict(list), defaultdict(list)
        for move in moves:
            if move.source == move.target == self._rank:
                targets[move.number].copy_(self._part(move))
            elif move.source == self._rank:
                sent[move.target].append(move)
            elif move.target == self._rank:
                received[move.source].append(move)
        arrived = {source: self._room(parts) for source, parts in received.items()}
        operations = []
        for peer in range(dist.get_world_size()):
            if peer in sent:
                operations.append(dist.P2POp(dist.isend, self._packed(sent[peer]), group=self._group, group_peer=peer))
            if peer in arrived:
                operations.append(dist.P2POp(dist.irecv, arrived[peer], group=self._group, group_peer=peer))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for source, parts in received.items():
            for move, values in zip(parts, _split(arrived[source], parts), strict=True):
                targets[move.number].copy_(values)

    def _room(self, moves: Sequence[_Move]) -> Tensor:
        return torch.empty(sum(_aligned(move.nbytes) for move in moves), dtype=torch.uint8, device=self._device)

    def _packed(self, moves: Sequence[_Move]) -> Tensor:
        buffer = self._room(moves)
        for move, into in zip(moves, _split(buffer, moves), strict=True):
            into.copy_(self._part(move))
        return buffer

    def _part(self, move: _Move) -> Tensor:
        part = next(each.values for each in self._held[move.name].rectangles if each.offsets == move.chunk)
        for dim, (start, size) in enumerate(zip(move.start, move.sizes, strict=True)):
            part = part.narrow(dim, start, size)
        return part


def _in_step(moves: Sequence[_Move]) -> list[_Move]:
    """Order moves so that all ranks give their memory back equally fast, while they all get the new layout's."""
    totals, sent = Counter[int](), Counter[int]()
    for move in moves:
        totals[move.source] += move.nbytes
    begins: dict[tuple[str, Ints], float] = {}  # all parts of a chunk stay together
    for move in moves:
        begins.setdefault((move.name, move.chunk), sent[move.source] / max(1, totals[move.source]))
        sent[move.source] += move.nbytes
    return sorted(moves, key=lambda each: (begins[each.name, each.chunk], each.name, each.chunk))


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


def _split(buffer: Tensor, moves: Sequence[_Move]) -> Iterator[Tensor]:
    """Yield the part of a message that belongs to each move, in its dtype and shape."""
    start = 0
    for move in moves:
        yield buffer[start : start + move.nbytes].view(move.dtype).view(move.sizes)
        start += _aligned(move.nbytes)


def _aligned(nbytes: int) -> int:
    """Return the bytes that a part takes, so that the next one begins at a multiple of every element size."""
    return -(-nbytes // 16) * 16
