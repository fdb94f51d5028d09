"""The memory of asynchronous saves."""

from __future__ import annotations

import pytest
import torch

from plugins.hybrid_parallel.checkpoint.atomic_save import Staging, blocks_of_powers

MIB = 2**20


@pytest.mark.parametrize(
    "room",
    [
        [0, 0],
        [64],
        [100 * MIB] * 7,
        [525 * MIB, *[117 * MIB] * 32, *[33 * MIB] * 64, *[64] * 65],  # shards of a model of 8 billion parameters
    ],
)
def test_page_locked_memory_is_little_more_than_what_it_holds(room: list[int]) -> None:
    sizes, places = blocks_of_powers(room)
    assert all(size & (size - 1) == 0 for size in sizes)
    used = [[] for _ in sizes]
    for size, (block, start) in zip(room, places, strict=True):
        used[block].append((start, start + size))
    for size, parts in zip(sizes, used, strict=True):
        ends = [0, *(stop for _, stop in sorted(parts))]
        assert ends[:-1] == [start for start, _ in sorted(parts)], "the pieces lie side by side"
        assert ends[-1] <= size
    assert sum(sizes) <= max(1.3 * sum(room), 2)


def test_pieces_are_copied_and_memory_is_used_again() -> None:
    staging = Staging()
    values = [torch.randn(3, 5), torch.randn(7).to(torch.bfloat16), torch.empty(0), torch.tensor(4)]
    copies = staging._copies(values)
    assert all(torch.equal(copy, value) for copy, value in zip(copies, values, strict=True))
    before = [block.data_ptr() for block in staging._blocks]
    staging._copies([value + 1 for value in values])
    assert [block.data_ptr() for block in staging._blocks] == before
    assert torch.equal(copies[0], values[0] + 1)
