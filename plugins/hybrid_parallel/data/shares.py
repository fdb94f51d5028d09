"""Shares of what samplers and iterable datasets yield: one for each replica, all together each sample once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, get_worker_info

from plugins.hybrid_parallel.data.random_stream import LoadingStream


class DataParallelBatchSampler(BatchSampler):
    """This rank's share of groups of `world_size` batches.

    Args:
        batch_sampler: the user's, the same on all ranks.
        rank, world_size: position on the data-parallel axis; 0 of 1 where the user's sampler yields shares already.

    Attributes:
        empty_batches: positions of this epoch's batches that stand for an empty share.
        stream: what samplers without a generator of their own draw from.
    """

    def __init__(self, batch_sampler: BatchSampler, rank: int, world_size: int) -> None:
        self.batch_sampler, self.rank, self.world_size = batch_sampler, rank, world_size
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", None)
        self.empty_batches: set[int] = set()
        self.stream: LoadingStream | None = None
        self._begun: Iterator[list[int]] | None = None

    def begin(self) -> None:
        """Ask the user's sampler for another epoch, now and not with its first batch."""
        with self._drawing():
            self._begun = iter(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        self.empty_batches.clear()
        group: list[list[int]] = []
        position = 0
        for batch in self._batches():
            group.append(list(batch))
            if len(group) == self.world_size:
                yield self._share(group, position)
                group, position = [], position + 1
        if group and not self.drop_last:
            yield self._share(group, position)

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        return batches // self.world_size if self.drop_last else math.ceil(batches / self.world_size)

    def _batches(self) -> Iterator[list[int]]:
        """The order is to be the same on all ranks, however many numbers the samples draw in between."""
        batches, self._begun = self._begun or iter(self.batch_sampler), None
        while True:
            with self._drawing():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _drawing(self) -> AbstractContextManager[None]:
        return nullcontext() if self.stream is None else self.stream.active()

    def _share(self, group: list[list[int]], position: int) -> list[int]:
        if len({len(batch) for batch in group}) == 1 and len(group) == self.world_size:
            return group[self.rank]
        samples = [index for batch in group for index in batch]
        share = even_share(samples, self.rank, self.world_size)
        if not share:
            # A loader cannot collate nothing: it collates one sample, whose row is cut off again.
            self.empty_batches.add(position)
            return samples[:1]
        return share


class DataParallelIterable(IterableDataset):
    """This rank's share of an iterable dataset, in groups of `batch_size * world_size` samples.

    Args:
        dataset: the user's, which yields the same samples on all ranks.
        batch_size: of one rank.
        drop_last: whether a short last group is left out.
        rank, world_size: position on the data-parallel axis.

    Attributes:
        stream: what a dataset without a generator of its own draws from, in this process.
        base_seed: of the same in worker processes.
    """

    def __init__(self, dataset: IterableDataset, batch_size: int, drop_last: bool, rank: int, world_size: int) -> None:
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.rank, self.world_size = rank, world_size
        self.stream: LoadingStream | None = None
        self.base_seed = 0
        self._workers_stream: LoadingStream | None = None

    def __iter__(self) -> Iterator[Any]:
        group: list[Any] = []
        for sample in self._samples():
            group.append(sample)
            if len(group) == self.batch_size * self.world_size:
                yield from group[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]
                group = []
        if group and not self.drop_last:
            yield from even_share(group, self.rank, self.world_size) or [_Unowned(group[0])]

    def _samples(self) -> Iterator[Any]:
        """What the dataset draws is to be the same on all ranks, however many numbers collating draws in between."""
        stream, end = self._own_stream(), object()
        with nullcontext() if stream is None else stream.active():
            samples = iter(self.dataset)
        while True:
            with nullcontext() if stream is None else stream.active():
                sample = next(samples, end)
            if sample is end:
                return
            yield sample

    def _own_stream(self) -> LoadingStream | None:
        worker = get_worker_info()
        if worker is None:
            return self.stream
        if self._workers_stream is None:  # one that stays goes on with it in the next epoch
            self._workers_stream = LoadingStream.seeded(self.base_seed + worker.id)
        return self._workers_stream


class _Unowned:
    """A sample of another rank, which stands for an empty share."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample


class CollateShare:
    """The user's `collate_fn`, for shares that may be empty."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: list[Any]) -> Any:
        if isinstance(samples[0], _Unowned):
            return without_rows(self.collate_fn([samples[0].sample]))
        return self.collate_fn(samples)


def even_share(samples: list[Any], rank: int, world_size: int) -> list[Any]:
    """The part of `samples` that is the rank's; parts differ by one at most."""
    return samples[len(samples) * rank // world_size : len(samples) * (rank + 1) // world_size]


def without_rows(batch: Any) -> Any:
    """The batch with no sample in its tensors."""
    if isinstance(batch, Tensor):
        return batch[:0]
    if hasattr(batch, "items"):
        return {key: without_rows(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [without_rows(value) for value in batch]
    return batch
