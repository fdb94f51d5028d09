"""Rectangles of whole tensors in safetensors files: each rank writes its own, and reads its own from those of others.

Every chunk has exactly one owner by construction, so each rank plans by itself, without a word to the others. What was
written is described as JSON. No pickle.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint.files.tensor_file import TensorFileReader, TensorFileWriter, for_each
from plugins.hybrid_parallel.checkpoint.state.global_tensor import GlobalTensor, TensorChunk
from plugins.hybrid_parallel.checkpoint.state.manifest import Chunk, Manifest, chunk_key

# What a rank wrote, as JSON: name -> [shape, dtype, [[offsets, sizes, file, checksum], ...]].
WrittenTensors = dict[str, list[Any]]


class Read(NamedTuple):
    """A part of a chunk, and the memory that it is read into."""

    name: str  # of the whole tensor
    chunk: Chunk
    start: tuple[int, ...]  # position in the chunk
    sizes: tuple[int, ...]
    into: Tensor  # of shape `sizes`


def write_tensors(tensors: Mapping[str, GlobalTensor], path: Path) -> WrittenTensors:
    """Write this rank's rectangles to one safetensors file, and return their description.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.rectangles}
    entries = {
        chunk_key(name, each.offsets): (tensor.dtype, each.sizes)
        for name, tensor in tensors.items()
        for each in tensor.rectangles
    }
    written = describe_tensors(tensors, path.name)
    with TensorFileWriter(path, entries) as file:
        for name, tensor in tensors.items():
            for described, each in zip(written[name][2], tensor.rectangles, strict=True):
                described[3] = file.write(chunk_key(name, each.offsets), each.values)
    return written


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


def read_tensors(tensors: Mapping[str, GlobalTensor], directory: Path, manifest: Manifest) -> None:
    """Fill rectangles from a checkpoint that any layout saved."""
    files: dict[str, list[Read]] = defaultdict(list)
    for read in plan_reads(tensors, manifest):
        files[read.chunk.file].append(read)
    for name, reads in files.items():
        with TensorFileReader(directory / name) as file:
            for_each(partial(_fill, file), reads)


def plan_reads(tensors: Mapping[str, GlobalTensor], manifest: Manifest) -> list[Read]:
    """Return the parts of chunks that fill rectangles.

    Raises:
        ConfigurationError: a tensor is missing, has another shape, or is not covered by its chunks.
    """
    return [read for name, tensor in tensors.items() for read in _reads_of(name, tensor, manifest)]


def _reads_of(name: str, tensor: GlobalTensor, manifest: Manifest) -> list[Read]:
    saved = manifest.tensors.get(name)
    if saved is None or tuple(saved.shape) != tensor.shape:
        found = "is missing" if saved is None else f"has shape {tuple(saved.shape)}"
        raise ConfigurationError(
            f"{name} {found} in the checkpoint, the model has {tensor.shape}; "
            "load a checkpoint of the same configuration"
        )
    reads = [read for each in tensor.rectangles for chunk in saved.chunks for read in _overlap(name, each, chunk)]
    asked = sum(math.prod(each.sizes) for each in tensor.rectangles)
    if sum(math.prod(read.sizes) for read in reads) != asked:
        raise ConfigurationError(f"{name} has holes in the checkpoint: not all ranks' parts of it were saved")
    return reads


def _overlap(name: str, rectangle: TensorChunk, chunk: Chunk) -> Iterator[Read]:
    """Yield what a rectangle has in common with a chunk, if there is anything."""
    start, sizes, into = [], [], rectangle.values
    places = zip(rectangle.offsets, rectangle.sizes, chunk.offsets, chunk.sizes, strict=True)
    for dim, (offset, size, chunk_offset, chunk_size) in enumerate(places):
        low, high = max(offset, chunk_offset), min(offset + size, chunk_offset + chunk_size)
        if low >= high:
            return
        start.append(low - chunk_offset)
        sizes.append(high - low)
        into = into.narrow(dim, low - offset, high - low)
    yield Read(name, chunk, tuple(start), tuple(sizes), into)


@torch.no_grad()  # grad mode is thread-local
def _fill(file: TensorFileReader, read: Read) -> None:
    file.read(read.chunk.key(read.name), read.start, read.sizes, read.into)
