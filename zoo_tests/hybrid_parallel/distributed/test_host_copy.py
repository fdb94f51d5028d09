"""Copies from a GPU to host memory in parts; the copies are replaced, as no GPU is at hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from plugins.hybrid_parallel.distributed import agreement
from plugins.hybrid_parallel.distributed.agreement import _copied_ahead, host_chunks
from shardformer.distributed.collectives import as_bytes


def at_once(target: Tensor, source: Tensor) -> Callable[[], None]:
    """As fast as a copy may be: shows a buffer that is filled again too early."""
    target.copy_(source)
    return lambda: None


def at_the_wait(target: Tensor, source: Tensor) -> Callable[[], None]:
    """As slow as a copy may be: shows a buffer that is read too early."""
    return lambda: target.copy_(source)


@pytest.mark.parametrize("start_copy", [at_once, at_the_wait])
@pytest.mark.parametrize("length", [33, 64, 65, 200])
def test_parts_arrive_in_order(
    length: int, start_copy: Callable[[Tensor, Tensor], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "_PART", 32)
    data, allocated = torch.randint(0, 256, (length,), dtype=torch.uint8), []

    def allocate(size: int) -> Tensor:
        allocated.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    chunks = [chunk.clone() for chunk in _copied_ahead(data, 8, allocate, start_copy)]
    assert [chunk.numel() for chunk in chunks] == [part.numel() for part in data.split(8)]
    assert torch.equal(torch.cat(chunks), data)
    assert len(allocated) == 2 and sum(allocated) <= 64


def test_host_memory_is_not_copied() -> None:
    tensor = torch.arange(10, dtype=torch.float32)
    chunks = list(host_chunks(tensor, 16))
    assert [chunk.numel() for chunk in chunks] == [16, 16, 8]
    assert chunks[0].data_ptr() == tensor.data_ptr()


def test_a_column_of_one_row_has_bytes() -> None:
    """As the labels of a batch of one sample: its only value is two values from a next one."""
    column = torch.arange(2)[None, :, None][:, 1]
    assert [chunk.tolist() for chunk in host_chunks(torch.arange(6, 8)[::2], 16)] == [[6, *[0] * 7]]
    assert as_bytes(column).tolist() == [[1, *[0] * 7]]
