"""Return of freed memory: holes in the heap, and C libraries that cannot return them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from shardformer.utils import freed_memory
from shardformer.utils.freed_memory import FreedMemory, return_freed_memory


def _resident() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_holes_in_the_heap_are_returned() -> None:
    torch.ones(2**22)  # malloc now takes blocks below 16 MiB from the heap
    blocks = [torch.ones(2**16) for _ in range(512)]  # 128 MiB
    between = blocks[::2]
    del blocks
    before = _resident()
    return_freed_memory()
    assert before - _resident() > 48 * 2**20
    assert all(bool((block == 1).all()) for block in between)


def test_it_is_returned_by_fiftieths_of_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(freed_memory, "return_freed_memory", lambda: calls.append(size))
    freed = FreedMemory(500 * 2**20)
    for size in (9 * 2**20, 2**20, 9 * 2**20, 10 * 2**20):
        freed.add(size)
    assert calls == [2**20, 10 * 2**20]
    calls.clear()
    freed = FreedMemory(3)
    for size in (2**19, 2**19, 1):
        freed.add(size)
    assert calls == [2**19]


@pytest.mark.parametrize("error", [OSError, TypeError, None])
def test_other_c_libraries_have_no_such_function(
    error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def library(name: None) -> object:
        if error is not None:
            raise error
        return object()  # without malloc_trim

    monkeypatch.setattr(ctypes, "CDLL", library)
    return_freed_memory()
