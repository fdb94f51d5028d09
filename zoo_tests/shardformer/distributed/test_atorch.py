"""Named groups of ranks and the seeds of what they share, against the published tables.

What breaks here first: which axis varies fastest. Look in `shardformer/distributed/atorch.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardformer import MultiDimParallelRandomizer, ParallelGroups, create_parallel_group, parallel_group
from shardformer.distributed.atorch import (
    destroy_parallel_group,
    get_randomizer,
    init_randomizer,
    parallel_group_size,
    parallel_rank,
)
from zoo_tests.harness.ranks import distributed

CUBE = [("tensor", 2), ("data", 2), ("pipeline", 2)]
# Which groups draw the same -> the seeds of ranks 0 to 7.
SEEDS = {
    (): [0, 1, 2, 3, 4, 5, 6, 7],
    ("tensor",): [8, 8, 10, 10, 12, 12, 14, 14],
    ("data",): [16, 17, 16, 17, 20, 21, 20, 21],
    ("tensor", "data"): [24, 24, 24, 24, 28, 28, 28, 28],
    ("pipeline",): [32, 33, 34, 35, 32, 33, 34, 35],
    ("tensor", "pipeline"): [40, 40, 42, 42, 40, 40, 42, 42],
    ("data", "pipeline"): [48, 49, 48, 49, 48, 49, 48, 49],
    ("tensor", "data", "pipeline"): [56] * 8,
}


@pytest.mark.parametrize("same", SEEDS)
def test_the_table_of_seeds(same: tuple[str, ...]) -> None:
    groups = ParallelGroups.of(CUBE, None, 8)
    for base in (0, 1234):
        found = [MultiDimParallelRandomizer(base, groups, rank).seed(*same) for rank in range(8)]
        assert found == [base + seed for seed in SEEDS[same]]


def test_the_first_name_varies_fastest() -> None:
    groups = ParallelGroups.of([("tensor", 4), ("pipeline", 2), ("data", 2)], None, 16)
    assert groups.ranks("tensor") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert groups.ranks("pipeline")[:3] == [[0, 4], [1, 5], [2, 6]]
    assert groups.ranks("data")[:2] == [[0, 8], [1, 9]]
    assert groups.coordinates(13) == {"tensor": 1, "pipeline": 1, "data": 1}


def test_an_order_of_ranks() -> None:
    groups = ParallelGroups.of([("tensor", 2), ("data", 2)], [3, 1, 0, 2], 4)
    assert groups.ranks("tensor") == [[3, 1], [0, 2]]
    assert groups.coordinates(0) == {"tensor": 0, "data": 1}


@pytest.mark.parametrize(
    ("axes", "order", "message"),
    [
        ([("tensors", 2)], None, "the parallel group 'tensors' is not known; use each of tensor, data"),
        ([("pipe", 2), ("pipeline", 1)], None, "the parallel group 'pipeline' is there twice"),
        ([("tensor", 0)], None, "the parallel group 'tensor' of size 0 has no ranks; use a size of 1 or more"),
        ([("tensor", 3)], None, r"sizes {'tensor': 3} make 3 ranks of 2; use sizes whose product is the world size"),
        ([("tensor", 2)], [0, 0], r"the order of ranks \[0, 0\] is no permutation of 0 to 1; use one, or None"),
    ],
)
def test_what_makes_no_grid(axes: list, order: list | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelGroups.of(axes, order, 2)


def test_streams_go_on_and_leave_torchs_own_alone() -> None:
    groups = ParallelGroups.of(CUBE, None, 8)
    randomizer = MultiDimParallelRandomizer(1234, groups, 3)
    torch.manual_seed(0)
    untouched = torch.rand(2)
    torch.manual_seed(0)
    drawn = []
    for _ in range(2):
        with randomizer.get_randomizer("tensor").fork():
            drawn.append(torch.rand(3))
    torch.testing.assert_close(torch.rand(2), untouched)
    expected = torch.rand(6, generator=torch.Generator().manual_seed(randomizer.seed("tensor")))
    torch.testing.assert_close(torch.cat(drawn), expected[:6])
    states = randomizer.get_states()
    with randomizer.get_randomizer("tensor").fork():
        later = torch.rand(1)
    other = MultiDimParallelRandomizer(1234, groups, 3)
    other.set_states(states)
    with other.get_randomizer("tensor").fork():
        torch.testing.assert_close(torch.rand(1), later)
    with pytest.raises(ValueError, match="there is no parallel group 'expert'; use one of tensor, data, pipeline"):
        other.seed("expert")


@distributed(4)
def test_groups_of_processes() -> None:
    create_parallel_group(([("tensor", 2), ("pipe", 2)], None))
    try:
        assert (parallel_group_size("tensor"), parallel_group_size("data")) == (2, 1)
        assert (parallel_rank("tensor"), parallel_rank("pipeline")) == (dist.get_rank() % 2, dist.get_rank() // 2)
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total, group=parallel_group("pipeline"))
        assert total == {0: 2, 1: 4}[parallel_rank("tensor")]
        init_randomizer(7)
        with get_randomizer("tensor").fork():
            mine = torch.rand(1)
        others = [torch.empty(1) for _ in range(4)]
        dist.all_gather(others, mine)
        assert torch.equal(others[0], others[1]) and not torch.equal(others[0], others[2])
    finally:
        destroy_parallel_group()
    assert parallel_group("tensor") is None and parallel_rank("tensor") == 0
