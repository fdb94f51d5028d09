"""GlobalTensor: a tensor of the whole model, stored on each rank as a set of rectangles.

Checkpoints store whole tensors under Hugging Face names. A rank holds a shard along one dim (tensor parallelism), which
may consist of several parts (a fused query-key-value weight), and of this shard a range of flattened elements (ZeRO).
Both are exact unions of rectangles of the whole tensor, which `torch.distributed.checkpoint` can store and reshard. A
save gathers nothing, and each rank writes only its own data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from shardformer.matmul.quantised import is_quantised
from shardformer.shard_spec import ShardSpec

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class TensorChunk:
    """A rectangle of the whole tensor that is on this rank.

    Attributes:
        offsets, sizes: position and shape in the whole tensor.
        values: elements of the rectangle, of shape `sizes`; a view of the rank's own memory.
    """

    offsets: Sizes
    sizes: Sizes
    values: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Position and shape of this rectangle, as `torch.distributed.checkpoint` describes them."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=torch.Size(self.sizes))


class GlobalTensor:
    """The local rectangles of a whole tensor; `torch.distributed.checkpoint` accepts it instead of a tensor.

    Args:
        shape: shape of the whole tensor.
        dtype: dtype of the elements.
        rectangles: disjoint rectangles on this rank.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, rectangles: Sequence[TensorChunk]) -> None:
        self.shape, self.dtype, self.rectangles = tuple(shape), dtype, list(rectangles)

    @classmethod
    def whole(cls, tensor: Tensor) -> GlobalTensor:
        """Wrap a tensor that is complete on this rank."""
        shape = tuple(tensor.shape)
        return cls(shape, tensor.dtype, [TensorChunk((0,) * len(shape), shape, tensor.detach())])

    @classmethod
    def piece(cls, spec: ShardSpec, values: Tensor, start: int = 0, stop: int | None = None) -> GlobalTensor:
        """Wrap a range of the flattened local shard of a `spec`.

        Args:
            values: elements of the range, in any shape.
            start, stop: the range; the whole shard by default.
        """
        stop = math.prod(spec.local_shape) if stop is None else stop
        flat = values.detach().reshape(-1)
        found = []
        for offsets, sizes in rectangles_of_range(spec.local_shape, start, stop):
            begin = _flat_index(spec.local_shape, offsets) - start
            view = flat[begin : begin + math.prod(sizes)].view(sizes)
            found += [TensorChunk(*place, part) for place, part in _in_whole(spec, offsets, view)]
        return cls(spec.full_shape, values.dtype, found)

    # ----- the protocol of torch.distributed.checkpoint -----

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return torch.Size(self.shape)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:  # noqa: PLW3201
        return [
            WriteItem(
                index=MetadataIndex(name, each.chunk.offsets, index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(each.chunk, TensorProperties(dtype=self.dtype), self.size()),
            )
            for index, each in enumerate(self.rectangles)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:  # noqa: PLW3201
        return [each.chunk for each in self.rectangles]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:  # noqa: PLW3201
        return next(each.values for each in self.rectangles if each.offsets == tuple(index.offset))


def rectangles_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Split the range [start, stop) of a flattened tensor into rectangles (offsets, sizes), each contiguous in memory.

    A range of a matrix has at most three: the end of a row, whole rows, the start of a row.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row, rest = math.prod(shape[1:]), tuple(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        yield from _in_row(last, rest, start - last * row, stop - last * row)
        return
    yield from _in_row(first - 1, rest, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0,) * len(rest)), (last - first, *rest)
    yield from _in_row(last, rest, 0, stop - last * row)


def _in_row(index: int, shape: Sizes, start: int, stop: int) -> Iterator[tuple[Sizes, Sizes]]:
    for offsets, sizes in rectangles_of_range(shape, start, stop):
        yield (index, *offsets), (1, *sizes)


def _flat_index(shape: Sequence[int], offsets: Sequence[int]) -> int:
    index = 0
    for size, offset in zip(shape, offsets, strict=True):
        index = index * size + offset
    return index


def _in_whole(spec: ShardSpec, offsets: Sizes, view: Tensor) -> Iterator[tuple[tuple[Sizes, Sizes], Tensor]]:
    """Map a rectangle of the local shard to rectangles of the whole tensor: one per part, none for padding."""
    if spec.dim is None:
        yield (offsets, tuple(view.shape)), view
        return
    dim, position = spec.dim, 0
    begin, end = offsets[dim], offsets[dim] + view.shape[dim]
    for start, stop, padding in spec.pieces():
        low, high = max(begin, position), min(end, position + stop - start)
        if low < high:
            part = view.narrow(dim, low - begin, high - low)
            place = (*offsets[:dim], start + low - position, *offsets[dim + 1 :])
            yield (place, tuple(part.shape)), part
        position += stop - start + padding


def local_tensors(model: HybridParallelModel, unique: bool) -> Iterator[tuple[list[str], Tensor]]:
    """Yield (names, tensor) for each local parameter and persistent buffer, once each, with all of its names.

    Args:
        unique: skip tensors that another stage saves.
    """
    module = model.unwrap()
    persistent = set(module.state_dict(keep_vars=True))
    groups: dict[int, tuple[list[str], Tensor]] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        # Quantised weights never change, and what a layout cuts of them is no rectangle of the whole.
        if name in persistent and not is_quantised(tensor):
            groups.setdefault(id(tensor), ([], tensor))[0].append(name)
    for names, tensor in groups.values():
        if not unique or tensor not in model.saved_elsewhere:
            yield (
                names + [alias for name in names for alias in model.origin.aliases.get(name, ()) if alias not in names],
                tensor,
            )
