"""GlobalTensor: a tensor of the whole model, of which a rank holds rectangles.

Checkpoints speak of whole tensors under Hugging Face names. What a rank holds of one is a piece cut along a dim
(tensor parallelism), perhaps of several parts (a fused query-key-value weight), and of that piece a range of its
flattened elements (ZeRO). Both are exact unions of rectangles of the whole tensor, which `torch.distributed.checkpoint`
can store and reshard; nothing is gathered to save, and no rank writes what is not its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardformer.shard_spec import ShardSpec

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class TensorChunk:
    """A part of the whole tensor that is here.

    Attributes:
        offsets, sizes: where it lies in the whole tensor.
        values: the elements, a view of the rank's own memory, of shape `sizes`.
    """

    offsets: Sizes
    sizes: Sizes
    values: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=torch.Size(self.sizes))


class GlobalTensor:
    """What a rank holds of a whole tensor; `torch.distributed.checkpoint` takes it in the place of a tensor.

    Args:
        shape: of the whole tensor.
        dtype: of its elements.
        rectangles: disjoint parts of it.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, rectangles: Sequence[TensorChunk]) -> None:
        self.shape, self.dtype, self.rectangles = tuple(shape), dtype, list(rectangles)

    @classmethod
    def whole(cls, tensor: Tensor) -> GlobalTensor:
        """A tensor that is here uncut."""
        shape = tuple(tensor.shape)
        return cls(shape, tensor.dtype, [TensorChunk((0,) * len(shape), shape, tensor.detach())])

    @classmethod
    def piece(cls, spec: ShardSpec, values: Tensor, start: int = 0, stop: int | None = None) -> GlobalTensor:
        """A range of the flattened local tensor of a `spec`.

        Args:
            values: the elements of the range, in any shape.
            start, stop: the range; everything for None.
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
    """The range [start, stop) of a flattened tensor as rectangles (offsets, sizes), each contiguous in memory.

    A range of a matrix is at most three: the end of a row, whole rows, the start of a row.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row, rest = math.prod(shape[1:]), tuple(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside of one row
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
    """A rectangle of the local tensor as rectangles of the whole one: each part has its own place, padding has none."""
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
