"""Shares of data loaders: together they are the global batches, and every sample comes once.

What breaks here first: the last short batch, and the order of samples on other ranks. Look in
`plugins/hybrid_parallel/data/dataloader.py`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    default_collate,
)
from transformers import BatchEncoding

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data import dataloader as module
from plugins.hybrid_parallel.data.dataloader import ShardedDataLoader
from plugins.hybrid_parallel.data.random_stream import OrderStream
from plugins.hybrid_parallel.data.sharded_sampler import DataParallelBatchSampler

CPU = torch.device("cpu")


def shard_dataloader(loader: DataLoader, rank: int, world_size: int, seed: int) -> ShardedDataLoader:
    """The loader of one rank, whose order is drawn from `seed`."""
    return module.shard_dataloader(loader, rank, world_size, CPU, OrderStream.seeded(seed))


def _collate(samples: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([sample[0] for sample in samples])}


def _loaders(num_samples: int, world_size: int, seed: int = 3, **options: Any) -> list[ShardedDataLoader]:
    """The loader of every rank."""
    dataset = TensorDataset(torch.arange(num_samples))
    return [
        shard_dataloader(DataLoader(dataset, collate_fn=_collate, **options), rank, world_size, seed)
        for rank in range(world_size)
    ]


def _epochs(loader: ShardedDataLoader, count: int = 1) -> list[list[list[int]]]:
    return [[batch["x"].tolist() for batch in loader] for _ in range(count)]


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_shares_together_are_the_global_batches(samples: int, batch_size: int, ranks: int, drop_last: bool) -> None:
    loaders = _loaders(samples, ranks, batch_size=batch_size, drop_last=drop_last)
    shares = [_epochs(loader)[0] for loader in loaders]
    whole = batch_size * ranks
    expected = [list(range(start, min(start + whole, samples))) for start in range(0, samples, whole)]
    if drop_last:
        # As the user's own loader does, which drops what does not fill a batch; then what does not fill all ranks.
        expected = [batch for batch in expected if len(batch) == whole]
    assert [len(loader) for loader in loaders] == [len(share) for share in shares] == [len(expected)] * ranks
    for position, batch in enumerate(expected):
        parts = [share[position] for share in shares]
        assert [index for part in parts for index in part] == batch
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1, "a short batch is split as evenly as possible"


def test_fewer_samples_than_ranks_leave_empty_shares_with_the_same_keys() -> None:
    loaders = _loaders(2, 4, batch_size=3)
    batches = [next(iter(loader)) for loader in loaders]
    assert sorted(len(batch["x"]) for batch in batches) == [0, 0, 1, 1]
    assert all(set(batch) == {"x"} for batch in batches)
    assert [len(loader) for loader in loaders] == [1] * 4


class _Batch:
    """A batch of a class that only its user knows."""

    def __init__(self, samples: list[Any]) -> None:
        self.x, self.names = default_collate(samples)[0], [str(x) for x, _ in samples]


# What collates samples (x, y) -> what is left of none, with the length of each tensor.
_COLLATED: list[tuple[Callable[[list[Any]], Any], Any]] = [
    (default_collate, [(0,), (0,)]),
    (lambda rows: tuple(default_collate(rows)), [(0,), (0,)]),
    (lambda rows: rows, []),
    (
        lambda rows: {"x": default_collate(rows)[0], "text": [str(x) for x, _ in rows], "all": "ab"},
        {"x": (0,), "text": [], "all": "ab"},
    ),
    (lambda rows: BatchEncoding({"x": default_collate(rows)[0]}), {"x": (0,)}),
    (lambda rows: ((default_collate(rows)[0],), "note"), [[(0,)], "note"]),
    (_Batch, {"x": (0,), "names": []}),
]


def _described(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape)
    if isinstance(batch, Mapping | _Batch):
        return {name: _described(each) for name, each in (batch if isinstance(batch, Mapping) else vars(batch)).items()}
    return list(map(_described, batch)) if isinstance(batch, list | tuple) else batch


@pytest.mark.parametrize(("collate", "expected"), _COLLATED)
def test_an_empty_share_is_of_the_type_of_the_others(collate: Callable[[list[Any]], Any], expected: Any) -> None:
    data = TensorDataset(torch.arange(1), torch.arange(1))
    loaders = [shard_dataloader(DataLoader(data, collate_fn=collate), rank, 2, 3) for rank in range(2)]
    empty, full = (next(iter(loader)) for loader in loaders)
    assert type(empty) is type(full) and _described(full) != _described(empty)
    assert _described(empty) == expected


def test_shuffling_is_alike_on_all_ranks_and_differs_by_epoch_and_seed() -> None:
    first, second = (_epochs(loader, 3) for loader in _loaders(11, 2, batch_size=2, shuffle=True))
    orders = []
    for epoch in range(3):
        joined = [index for parts in zip(first[epoch], second[epoch], strict=True) for part in parts for index in part]
        assert sorted(joined) == list(range(11))
        orders.append(tuple(joined))
    assert len(set(orders)) == 3 and tuple(range(11)) not in orders
    assert _epochs(_loaders(11, 2, batch_size=2, shuffle=True)[0], 3) == first, "the same seed gives the same order"
    assert _epochs(_loaders(11, 2, seed=4, batch_size=2, shuffle=True)[0], 3) != first


def test_the_order_does_not_depend_on_the_number_of_ranks() -> None:
    alone = _epochs(_loaders(12, 1, batch_size=4, shuffle=True)[0])[0]
    shares = [_epochs(loader)[0] for loader in _loaders(12, 2, batch_size=2, shuffle=True)]
    assert [a + b for a, b in zip(*shares, strict=True)] == alone


def test_a_generator_of_the_user_decides_the_order() -> None:
    """Every rank made its generator from the same seed; the plugin's seed must not matter then."""
    orders = []
    for seed in (3, 4):
        dataset = TensorDataset(torch.arange(11))
        shares = []
        for rank in range(2):
            generator = torch.Generator().manual_seed(5)
            loader = DataLoader(dataset, batch_size=2, shuffle=True, collate_fn=_collate, generator=generator)
            shares.append(_epochs(shard_dataloader(loader, rank, 2, seed))[0])
        orders.append([index for parts in zip(*shares, strict=True) for part in parts for index in part])
    assert orders[0] == orders[1] and sorted(orders[0]) == list(range(11)) != orders[0]


@pytest.mark.parametrize("done", [0, 1, 3])
def test_position_in_the_middle_of_an_epoch_is_restored(done: int) -> None:
    loader, other = (_loaders(10, 2, batch_size=1, shuffle=True)[1] for _ in range(2))
    _epochs(loader)
    batches = iter(loader)
    for _ in range(done):
        next(batches)
    other.load_state_dict(loader.state_dict())
    rest = [batch["x"].tolist() for batch in batches]
    assert _epochs(other)[0] == rest and len(rest) == 5 - done
    assert _epochs(other) == _epochs(loader), "the epoch after that is whole again"


def test_state_after_a_finished_epoch_begins_the_next() -> None:
    loader, other = (_loaders(10, 2, batch_size=2, shuffle=True)[0] for _ in range(2))
    first = _epochs(loader)
    other.load_state_dict(loader.state_dict())
    second = _epochs(loader)
    assert _epochs(other) == second != first


def test_an_epoch_is_over_when_all_its_batches_were_handed_out() -> None:
    """The loop of `execute_pipeline` asks for `len(loader)` batches and never sees the iterator end."""
    expected = _epochs(_loaders(10, 2, batch_size=2, shuffle=True)[0], 3)
    loader = _loaders(10, 2, batch_size=2, shuffle=True)[0]
    found = []
    for epoch in range(3):
        assert (loader.epoch, loader.position) == (epoch, 0)
        batches = iter(loader)
        found.append([next(batches)["x"].tolist() for _ in range(len(loader))])
    assert found == expected and found[0] != found[1]


class _Drawing(TensorDataset):
    """Samples from torch's, Python's and numpy's numbers."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (torch.tensor([index, random.random(), np.random.rand(), torch.rand(())]),)


def _drawn(loader: ShardedDataLoader, count: int | None = None) -> list[list[list[float]]]:
    batches = []
    for batch in loader:
        batches.append(batch["x"].tolist())
        torch.rand(3), random.random(), np.random.rand()  # what training draws in between
        if len(batches) == count:
            break
    return batches


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("own_generator", [False, True])
def test_augmented_samples_are_the_same_after_resuming(num_workers: int, own_generator: bool) -> None:
    def loader(seed: int) -> ShardedDataLoader:
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        generator = torch.Generator().manual_seed(seed) if own_generator else None
        plain = DataLoader(
            _Drawing(torch.arange(9)),
            batch_size=2,
            shuffle=True,
            collate_fn=_collate,
            num_workers=num_workers,
            generator=generator,
        )
        return shard_dataloader(plain, 1, 2, seed)

    whole = loader(1)
    expected = [_drawn(whole), _drawn(whole)]
    assert expected[0] != expected[1]
    begun, other = loader(1), loader(2)
    _drawn(begun)
    assert _drawn(begun, 1) == expected[1][:1]
    other.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert _drawn(other) == expected[1][1:]


def test_loading_leaves_the_numbers_of_training_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(4).tolist()
    torch.manual_seed(0)
    assert [torch.rand(()).item() for _ in _loaders(8, 2, batch_size=1, shuffle=True)[0]] == expected


def test_empty_shares_after_a_restored_position() -> None:
    """9 samples over 4 ranks: the last of 3 global batches has one sample, the other ranks have none."""
    for rank, loader in enumerate(_loaders(9, 4, batch_size=1)):
        loader.load_state_dict({"epoch": 0, "samples": 4, "global_batch_size": 4})
        assert [len(batch["x"]) for batch in loader] == [1, int(rank == 3)]


def test_users_batch_sampler_is_kept() -> None:
    sampler = BatchSampler(SequentialSampler(range(7)), 2, drop_last=False)
    share = [list(DataParallelBatchSampler(sampler, rank, 2)) for rank in range(2)]
    assert share == [[[0, 1], [4]], [[2, 3], [5, 6]]]


class _Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        return ((torch.tensor(index),) for index in range(self.count))


def _stream_loaders(count: int, **options: Any) -> list[ShardedDataLoader]:
    return [
        shard_dataloader(DataLoader(_Stream(count), collate_fn=_collate, **options), rank, 2, 0) for rank in range(2)
    ]


def test_iterable_datasets_are_shared_out_too() -> None:
    shares = [_epochs(loader)[0] for loader in _stream_loaders(10, batch_size=3)]
    assert shares == [[[0, 1, 2], [6, 7]], [[3, 4, 5], [8, 9]]]
    shares = [_epochs(loader)[0] for loader in _stream_loaders(10, batch_size=3, drop_last=True)]
    assert shares == [[[0, 1, 2]], [[3, 4, 5]]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterable_dataset_with_too_few_last_samples_leaves_an_empty_share(num_workers: int) -> None:
    shares = [_epochs(loader)[0] for loader in _stream_loaders(7, batch_size=3, num_workers=num_workers)]
    if num_workers == 0:  # each worker yields the whole of such a dataset, in torch too
        assert shares == [[[0, 1, 2], []], [[3, 4, 5], [6]]]
    assert [len(batch) for share in shares for batch in share].count(0) == max(num_workers, 1)


@pytest.mark.parametrize("dataset", [TensorDataset(torch.arange(3)), _Stream(3)])
def test_a_loader_without_batches_is_refused(dataset: Any) -> None:
    with pytest.raises(ConfigurationError, match="use batch_size=1 or more"):
        shard_dataloader(DataLoader(dataset, batch_size=None), 0, 2, 0)


def test_the_batch_size_stays_that_of_a_replica() -> None:
    assert [loader.batch_size for loader in _loaders(10, 2, batch_size=3)] == [3, 3]
