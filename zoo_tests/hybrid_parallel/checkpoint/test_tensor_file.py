"""The streaming writer of safetensors files, against safetensors itself in both directions.

What fails here first is a header or an offset that safetensors reads otherwise. Look in
`plugins/hybrid_parallel/checkpoint/tensor_file.py`.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from plugins.hybrid_parallel.checkpoint.tensor_file import DTYPE_NAMES, TensorFileWriter, sync_directory
from plugins.hybrid_parallel.distributed.agreement import checksum

_EXAMPLES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
_NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")
_SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
_DTYPES = st.sampled_from(list(DTYPE_NAMES))


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Any bits at all, NaNs of all kinds among them; a bool is 0 or 1."""
    size = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.uint8).view(dtype).reshape(shape)


_TENSORS = st.dictionaries(_NAMES, st.builds(_tensor, _DTYPES, _SHAPES, st.integers(0, 99)), max_size=7)


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _entries(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> dict[str, int]:
    with TensorFileWriter(path, _entries(tensors), metadata) as writer:
        return {name: writer.write(name, tensor) for name, tensor in tensors.items()}


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return _entries(found) == _entries(expected) and all(
        _bits(found[name]) == _bits(tensor) for name, tensor in expected.items()
    )


@_EXAMPLES
@given(tensors=_TENSORS, metadata=st.none() | st.dictionaries(_NAMES, _NAMES))
def test_safetensors_reads_what_is_written(
    tensors: dict[str, Tensor], metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    sums = _write(path, tensors, metadata)
    assert sums == {name: checksum(tensor) for name, tensor in tensors.items()}
    assert _same(load_file(path), tensors)
    with safe_open(path, framework="pt") as file:
        assert (file.metadata() or {}) == (metadata or {})
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert header % 8 == 0  # the tensors start at a multiple of 8
    if tensors:
        # What was read can be written again by safetensors.
        save_file(load_file(path), tmp_path / "theirs", metadata)
        assert _same(load_file(tmp_path / "theirs"), tensors)


def test_every_dtype_of_safetensors_is_known(tmp_path: Path) -> None:
    for dtype, name in DTYPE_NAMES.items():
        save_file({"x": _tensor(dtype, (2, 3), 0)}, tmp_path / "theirs")
        with safe_open(tmp_path / "theirs", framework="pt") as file:
            assert file.get_slice("x").get_dtype() == name
        _write(tmp_path / "ours", {"x": _tensor(dtype, (2, 3), 0)})
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_views_are_written_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(7 * 6, dtype=torch.int16).view(7, 6)
    views = {"transposed": base.t(), "strided": base[::2, 1::3], "odd start": base.view(torch.uint8).flatten()[3:]}
    _write(tmp_path / "file", views)
    assert _same(load_file(tmp_path / "file"), views)


def test_long_tensors_are_written_in_chunks(tmp_path: Path) -> None:
    tensor = torch.randint(-(2**62), 2**62, (2**20 + 12345,))  # two chunks and a part of a block
    assert _write(tmp_path / "file", {"x": tensor})["x"] == checksum(tensor)
    assert torch.equal(load_file(tmp_path / "file")["x"], tensor)


@_EXAMPLES
@given(size=st.integers(1, 20_000), bit=st.integers(0, 10**6))
def test_the_checksum_finds_every_flipped_bit(size: int, bit: int) -> None:
    tensor = _tensor(torch.uint8, (size,), 5)
    before = checksum(tensor)
    bit %= size * 8
    tensor[bit // 8] ^= 1 << bit % 8
    assert checksum(tensor) != before


def test_the_checksum_finds_blocks_that_changed_places() -> None:
    blocks = torch.arange(4 * 4096, dtype=torch.int32).view(4, 4096)
    assert checksum(blocks) != checksum(blocks[[1, 0, 2, 3]])
    assert checksum(torch.zeros(4096)) != checksum(torch.zeros(8192))


def test_tensors_that_were_not_announced_are_refused(tmp_path: Path) -> None:
    entries = {"x": (torch.float32, (2,)), "y": (torch.float32, (2,))}
    with TensorFileWriter(tmp_path / "file", entries) as writer:
        for name, wrong in (("z", torch.ones(2)), ("x", torch.ones(3)), ("x", torch.ones(2, dtype=torch.int32))):
            with pytest.raises(ValueError, match=f"expects {name} once, as .* not "):
                writer.write(name, wrong)
        writer.write("y", torch.ones(2))  # another order is as good
        writer.write("x", torch.zeros(2))
        with pytest.raises(ValueError, match="for the second time"):
            writer.write("x", torch.zeros(2))
    assert load_file(tmp_path / "file")["y"].tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"still expects \['y'\]"), TensorFileWriter(tmp_path / "file", entries) as it:
        it.write("x", torch.ones(2))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"__metadata__": (torch.float32, (1,))}, "can be called __metadata__; give it another name"),
        ({"x": (torch.complex128, (1,))}, "dtype torch.complex128, which safetensors files cannot hold"),
        ({"x" * 10**8: (torch.float32, (1,))}, "more than the 100000000 that readers"),
        ({"\ud800": (torch.float32, (1,))}, "surrogates not allowed"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(entries: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        TensorFileWriter(tmp_path / "file", entries)
    assert not (tmp_path / "file").exists()


def test_a_full_disk_is_an_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        TensorFileWriter(Path("/dev/full"), {"x": (torch.float32, (2,))})


def test_writing_leaves_the_lock_to_others(tmp_path: Path) -> None:
    """A thread that counts gets on while another writes: no pause of it comes near the length of the write."""
    tensor, pauses, done = torch.zeros(2**25), [0.0], threading.Event()

    def count() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0)
            now = time.perf_counter()
            pauses.append(now - last)
            last = now

    counter = threading.Thread(target=count)
    counter.start()
    start = time.perf_counter()
    _write(tmp_path / "file", {"x": tensor})
    length = time.perf_counter() - start
    done.set()
    counter.join()
    assert max(pauses) < length / 2, (max(pauses), length)


def test_a_directory_is_synced(tmp_path: Path) -> None:
    sync_directory(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_directory(tmp_path / "gone")
