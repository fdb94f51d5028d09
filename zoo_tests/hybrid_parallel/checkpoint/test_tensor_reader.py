"""The reader of rectangles of safetensors files, against safetensors itself.

What fails here first is the position of a rectangle that is not contiguous in the file.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from plugins.hybrid_parallel.checkpoint import tensor_file
from plugins.hybrid_parallel.checkpoint.tensor_file import (
    DTYPE_NAMES,
    TensorFileReader,
    TensorFileWriter,
    read_header,
)

_RANGES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 3)), max_size=4)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(
    ranges=_RANGES,  # of each dim: elements before, in, and after the rectangle
    dtype=st.sampled_from(list(DTYPE_NAMES)),
    target=st.sampled_from(["contiguous", "transposed", "fp64"]),
    mapped=st.sampled_from([1, 40, 4096]),
    before=st.integers(1, 5000),
)
def test_any_rectangle_of_a_tensor(
    ranges: list[tuple[int, int, int]], dtype: torch.dtype, target: str, mapped: int, before: int, tmp_path: Path
) -> None:
    shape, lengths = [sum(each) for each in ranges], [length for _, length, _ in ranges]
    offsets = [offset for offset, *_ in ranges]
    bits = torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
    # What precedes the tensor moves it to any place of a page.
    save_file({"before": torch.zeros(before, dtype=torch.uint8), "x": bits.view(dtype).reshape(shape)}, tmp_path / "f")
    expected = load_file(tmp_path / "f")["x"][tuple(map(slice, offsets, map(sum, zip(offsets, lengths, strict=True))))]
    if target == "fp64" and not dtype.is_complex:
        expected = expected.to(torch.float64)
    found = torch.empty(lengths, dtype=expected.dtype)
    if target == "transposed":
        found = torch.empty(lengths[::-1], dtype=dtype).permute(tuple(range(len(lengths)))[::-1])
    with pytest.MonkeyPatch.context() as patch, TensorFileReader(tmp_path / "f") as file, warnings.catch_warnings():
        patch.setattr(tensor_file, "_MAPPED", mapped)
        warnings.simplefilter("error")  # torch's about memory that cannot be written
        file.read("x", offsets, lengths, found)
    assert _bits(found) == _bits(expected)


def test_places_of_more_than_32_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file with holes, which takes no space on the disk."""
    monkeypatch.setattr(TensorFileWriter, "_reserve", lambda writer, size: os.ftruncate(writer._file, size))
    side = 70_000  # 4.9e9 values
    writer = TensorFileWriter(tmp_path / "f", {"behind": (torch.int8, (3,)), "large": (torch.int16, (side, side))})
    writer.write("behind", torch.tensor([1, 2, 3], dtype=torch.int8))
    writer.close()
    with (tmp_path / "f").open("r+b") as file:
        start, entries = read_header(file)
        file.seek(start + entries["large"]["data_offsets"][0] + 2 * (side * side - 1))
        file.write(b"\x05\x00")
    with TensorFileReader(tmp_path / "f") as file:
        for name, offsets, expected in (
            ("large", (side - 1, side - 2), [[0, 5]]),  # in one piece
            ("large", (side - 2, side - 2), [[0, 0], [0, 5]]),
            ("behind", (1,), [2, 3]),
        ):
            found = torch.empty(torch.tensor(expected).shape, dtype=torch.int8 if name == "behind" else torch.int16)
            file.read(name, offsets, found.shape, found)
            assert found.tolist() == expected


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8))
