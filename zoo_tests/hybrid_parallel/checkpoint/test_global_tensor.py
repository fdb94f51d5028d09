"""Rectangles of whole tensors, and the manifest that lists them.

What fails here first is a range that is covered twice or not at all. Look in `global_tensor.py`, `dcp_storage.py` and
`tensor_file.py` of `plugins/hybrid_parallel/checkpoint`.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint.dcp_storage import plan_reads, read_tensors, write_tensors
from plugins.hybrid_parallel.checkpoint.global_tensor import GlobalTensor, TensorChunk, rectangles_of_range
from plugins.hybrid_parallel.checkpoint.tensor_file import (
    Chunk,
    Manifest,
    SavedFile,
    SavedTensor,
    merge_tensors,
    sequence_of,
)
from shardformer.shard_spec import Part, ShardSpec

_EXAMPLES = settings(max_examples=200, deadline=None, derandomize=True)
_SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def _cut_tensors(draw: st.DrawFn) -> tuple[list[ShardSpec], list[list[int]]]:
    """The specs of all ranks of a tensor, and where each rank's flattened piece is cut between replicas."""
    shape, world_size = draw(_SHAPES), draw(st.integers(1, 3))
    specs = [ShardSpec(shape, None, (), 0, 1)]
    if shape and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        first = draw(st.integers(0, shape[dim]))
        fused = (Part(first), Part(shape[dim] - first))
        padded = (Part(shape[dim], 1, -(-shape[dim] // world_size) * world_size),)
        parts = draw(st.sampled_from([fused, padded]))
        specs = [ShardSpec(shape, dim, parts, rank, world_size) for rank in range(world_size)]
    sizes = [math.prod(spec.local_shape) for spec in specs]
    cuts = [sorted(draw(st.lists(st.integers(0, size), max_size=3))) for size in sizes]
    return specs, [[0, *cut, size] for cut, size in zip(cuts, sizes, strict=True)]


@pytest.mark.slow
@_EXAMPLES
@given(_cut_tensors())
def test_pieces_cover_the_whole_tensor_once(cut: tuple[list[ShardSpec], list[list[int]]]) -> None:
    specs, bounds = cut
    whole = torch.arange(1, math.prod(specs[0].full_shape) + 1).view(specs[0].full_shape)
    found, count = torch.zeros_like(whole), torch.zeros_like(whole)
    for spec, cuts in zip(specs, bounds, strict=True):
        local = spec.shard(whole).reshape(-1)
        for start, stop in zip(cuts, cuts[1:], strict=False):
            piece = GlobalTensor.piece(spec, local[start:stop], start, stop)
            assert piece.shape == spec.full_shape
            for part in piece.rectangles:
                place = tuple(slice(*ends) for ends in zip(part.offsets, map(sum, _ends(part)), strict=True))
                found[place] = part.values
                count[place] += 1
    assert torch.equal(found, whole) and bool((count == 1).all())


def _ends(part: TensorChunk) -> list[tuple[int, int]]:
    return list(zip(part.offsets, part.sizes, strict=True))


@_EXAMPLES
@given(_SHAPES, st.data())
def test_rectangles_of_a_range_are_contiguous_and_few(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    indices = torch.arange(size).view(shape)
    found: list[int] = []
    rectangles = list(rectangles_of_range(shape, start, stop))
    for offsets, sizes in rectangles:
        place = tuple(slice(offset, offset + length) for offset, length in zip(offsets, sizes, strict=True))
        found += indices[place].flatten().tolist()
    assert found == list(range(start, stop))
    assert len(rectangles) <= max(2 * len(shape) - 1, 1)


def test_filling_a_rectangle_fills_the_tensor() -> None:
    values = torch.zeros(12)
    piece = GlobalTensor.piece(ShardSpec((4, 6), None, (), 0, 1), values, 5, 17)
    for part in piece.rectangles:
        part.values.fill_(part.offsets[0])
    assert values.tolist() == [0.0] + [1.0] * 6 + [2.0] * 5


def test_what_one_cut_has_written_another_reads(tmp_path: Path) -> None:
    """Ranges of elements are read as columns; a range that nobody has written is a hole."""
    whole = torch.arange(1.0, 31.0).view(5, 6)
    ends = ((0, 4), (4, 17), (17, 30))
    rows = [GlobalTensor.piece(ShardSpec((5, 6), None, (), 0, 1), whole.flatten()[a:b], a, b) for a, b in ends]
    written = [write_tensors({"w": piece}, tmp_path / f"{number}.safetensors") for number, piece in enumerate(rows)]
    for rank in range(2):
        spec = ShardSpec((5, 6), 1, (Part(6),), rank, 2)
        values = torch.zeros(spec.local_shape)
        read_tensors({"w": GlobalTensor.piece(spec, values)}, tmp_path, Manifest(0, {}, merge_tensors(written), {}))
        assert torch.equal(values, spec.shard(whole))
    with pytest.raises(
        ConfigurationError, match="w has holes in the checkpoint: not all ranks' parts of it were saved"
    ):
        plan_reads({"w": GlobalTensor.whole(whole)}, Manifest(0, {}, merge_tensors(written[1:]), {}))


# ----- the manifest -----

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def _manifest(state: object = None, sequence: int = 12) -> Manifest:
    chunks = [Chunk((0, 0), (2, 3), "state-12-rank0.safetensors", 7), Chunk((2, 0), (1, 3), "b", 2**32 - 1)]
    tensor = SavedTensor((3, 3), "bfloat16", chunks)
    return Manifest(sequence, {"b": SavedFile(100, 5)}, {'a/"ä\n': tensor}, {"extra": state})


@pytest.mark.slow
@_EXAMPLES
@given(_JSON, st.integers(0, 2**60))
def test_a_manifest_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, state: object, sequence: int
) -> None:
    path, manifest = tmp_path_factory.getbasetemp() / "manifest.json", _manifest(state, sequence)
    path.write_bytes(manifest.to_bytes())
    found = Manifest.read(path)
    assert found.checksum == zlib.crc32(path.read_bytes())
    found.checksum = 0
    assert found == manifest and sequence_of(path) == sequence
    assert json.loads(path.read_text())["sequence"] == sequence, "it is plain JSON"


@pytest.mark.slow
def test_every_flipped_bit_and_every_cut_of_a_manifest_is_found(tmp_path: Path) -> None:
    path, sound = tmp_path / "manifest.json", _manifest({"text": ', "crc32": 5}'}).to_bytes()
    for position in range(len(sound)):
        flipped = bytearray(sound)
        flipped[position] ^= 1 << position % 8
        for content in (bytes(flipped), sound[:position], sound[position + 1 :], sound + sound[:position] + b"}"):
            path.write_bytes(content)
            with pytest.raises(ConfigurationError, match=f"{path} is damaged"):
                Manifest.read(path)


def test_a_manifest_of_another_version_or_with_paths_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    manifest = _manifest()
    manifest.files = {"../b": SavedFile(100, 5)}
    path.write_bytes(manifest.to_bytes())
    with pytest.raises(ConfigurationError, match=r"names the file '../b' outside of its directory; do not load it"):
        Manifest.read(path)
    body = b'{"format": "hybrid-booster checkpoint", "version": 2}'
    path.write_bytes(body[:-1] + b', "crc32": %d}' % zlib.crc32(body))
    with pytest.raises(ConfigurationError, match="version 2; this package reads 'hybrid-booster checkpoint' version 1"):
        Manifest.read(path)
    assert sequence_of(tmp_path / "nothing") is None and sequence_of(path) is None
