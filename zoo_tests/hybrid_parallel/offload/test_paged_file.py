"""PagedFile: tensors keep their values whatever happens to their pages, and a full disk is one sentence.

What breaks here first: a tensor whose pages are dropped before they are in the file. Look in
`plugins/hybrid_parallel/offload/stores.py`.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.offload.stores import PagedFile
from plugins.hybrid_parallel.zero.collectives.shared_memory import PeerSegment


def _resident(tensor: torch.Tensor) -> int:
    """Bytes of the mapping that a tensor is in that are resident."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            inside = int(place[1], 16) <= tensor.data_ptr() < int(place[2], 16)
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_values_outlive_their_pages(tmp_path: Path) -> None:
    file = PagedFile(tmp_path / "states", "offload_optimizer")
    kinds = ((1, torch.float64), (70_001, torch.float32), (3, torch.int8))
    tensors = [file.empty(count, dtype) for count, dtype in kinds]
    assert not any(tensor.any() for tensor in tensors)
    values = [torch.arange(tensor.numel()).to(tensor.dtype) for tensor in tensors]
    for _ in range(2):
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
            file.page_out(tensor)
    assert _resident(tensors[1]) < 2**16
    file.read_ahead(tensors[1][:5])
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, values, strict=True))
    assert _resident(tensors[1]) >= 2**18
    assert not list((tmp_path / "states").iterdir())


def test_tensors_of_others_are_left_alone(tmp_path: Path) -> None:
    file, other = PagedFile(tmp_path, "offload_optimizer"), torch.ones(5000)
    file.page_out(other)
    file.read_ahead(other)
    assert other.sum() == 5000


def test_more_than_an_extent_and_a_reserve(tmp_path: Path) -> None:
    file = PagedFile(tmp_path, "offload_optimizer")
    file.reserve(3 * 2**20)
    reserved = os.fstat(file.file).st_blocks
    first = file.empty(2**18, torch.float32).fill_(1.0)
    assert os.fstat(file.file).st_blocks == reserved  # its space was taken before
    large = file.empty(2**26 + 1, torch.float32)
    large[-1] = 2.0
    file.page_out(large)
    assert (first.sum(), large[-1], large[0]) == (2**18, 2.0, 0.0)
    file.release(large)
    assert os.fstat(file.file).st_blocks * 512 < 2**25


def test_other_ranks_read_the_file(tmp_path: Path) -> None:
    file = PagedFile(tmp_path, "offload_parameters")
    tensor = file.empty(1000, torch.float32).fill_(3.0)
    file.page_out(tensor)
    peer = PeerSegment(os.getpid(), file.file, file.token)
    assert torch.equal(peer.map_view(file.place(tensor), 1000, torch.float32), tensor)


def test_what_cannot_hold_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("another run's")
    for directory, reason in ((tmp_path / "file", "it is a file"), (tmp_path / "no" / "parent", "No such file")):
        with pytest.raises(ConfigurationError, match=reason) as refused:
            PagedFile(directory, "offload_parameters")
        assert f"offload_parameters='{directory}' cannot hold the file of a rank" in str(refused.value)
    assert (tmp_path / "file").read_text() == "another run's"


def test_no_space_is_one_sentence(tmp_path: Path) -> None:
    file, status = PagedFile(tmp_path, "offload_optimizer"), os.statvfs(tmp_path)
    blocks = os.fstat(file.file).st_blocks
    with pytest.raises(ConfigurationError, match=r"has no space for .* MiB more of this rank: .* MiB are free; free"):
        file.reserve(2 * status.f_bavail * status.f_frsize)
    assert os.fstat(file.file).st_blocks == blocks  # and nothing was taken


def test_a_quota_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    file = PagedFile(tmp_path, "offload_optimizer")
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ConfigurationError, match=r"has no space for 0.4 MiB more of this rank"):
        file.empty(100_000, torch.float32)
