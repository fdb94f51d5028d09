"""Data loaders that give each data-parallel rank its share of every global batch.

A global batch is `batch_size * dp_size` consecutive samples, and rank r's share its r-th part. The last one of an
epoch may be short: it is split as evenly as possible and nothing is repeated, so that a rank's share may be empty.
Device placement, epochs and skipping ahead are accelerate's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from booster.errors import ConfigurationError


class DataParallelBatchSampler(BatchSampler):
    """This rank's share of groups of `dp_size` batches.

    Args:
        batch_sampler: the user's, the same on all ranks.
        rank, world_size: position on the data-parallel axis.

    Attributes:
        empty_batches: positions of this epoch's batches that stand for an empty share.
    """

    def __init__(self, batch_sampler: BatchSampler, rank: int, world_size: int) -> None:
        self.batch_sampler, self.rank, self.world_size = batch_sampler, rank, world_size
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", None)
        self.empty_batches: set[int] = set()

    def __iter__(self) -> Iterator[list[int]]:
        self.empty_batches.clear()
        group: list[list[int]] = []
        position = 0
        for batch in self.batch_sampler:
            group.append(list(batch))
            if len(group) == self.world_size:
                yield self._share(group, position)
                group, position = [], position + 1
        if group and not self.drop_last:
            yield self._share(group, position)

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        return batches // self.world_size if self.drop_last else math.ceil(batches / self.world_size)

    def _share(self, group: list[list[int]], position: int) -> list[int]:
        if len({len(batch) for batch in group}) == 1 and len(group) == self.world_size:
            return group[self.rank]
        samples = [index for batch in group for index in batch]
        share = _even_share(samples, self.rank, self.world_size)
        if not share:
            # A loader cannot collate nothing: it collates one sample, whose row is cut off again.
            self.empty_batches.add(position)
            return samples[:1]
        return share


class DataParallelIterable(IterableDataset):
    """This rank's share of an iterable dataset, in groups of `batch_size * dp_size` samples.

    Args:
        dataset: the user's, which yields the same samples on all ranks.
        batch_size: of one rank.
        drop_last: whether a short last group is left out.
        rank, world_size: position on the data-parallel axis.
    """

    def __init__(self, dataset: IterableDataset, batch_size: int, drop_last: bool, rank: int, world_size: int) -> None:
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[Any]:
        group: list[Any] = []
        for sample in self.dataset:
            group.append(sample)
            if len(group) == self.batch_size * self.world_size:
                yield from group[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]
                group = []
        if group and not self.drop_last:
            if len(group) < self.world_size:
                raise ConfigurationError(
                    f"the last {len(group)} samples of the iterable dataset are fewer than the {self.world_size} "
                    "data-parallel ranks; use drop_last=True"
                )
            yield from _even_share(group, self.rank, self.world_size)


class ShardedDataLoader(DataLoaderShard):
    """A loader of this rank's shares; `state_dict` knows how far an epoch has come.

    Attributes:
        global_batch_size: samples of a batch over all data-parallel ranks; without a known batch size, of those ranks.
    """

    global_batch_size = 1
    _position = 0  # batches of this epoch that were handed out

    def __iter__(self) -> Iterator[Any]:
        empty = getattr(self.batch_sampler, "empty_batches", ())
        self._position = self.skip_batches
        for batch in super().__iter__():
            self._position += 1
            yield _without_rows(batch) if self._position - 1 in empty else batch
        self._position = self.skip_batches = 0

    def state_dict(self) -> dict[str, int]:
        """Epoch, and samples of it that are done on all ranks together: they do not depend on the layout."""
        finished = self._position == len(self) if not isinstance(self.dataset, IterableDataset) else False
        return {
            "epoch": self.iteration + finished,
            "samples": 0 if finished else self._position * self.global_batch_size,
            "global_batch_size": self.global_batch_size,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next epoch begin where the saved one was.

        Raises:
            ConfigurationError: that is between two of this loader's batches.
        """
        position, rest = divmod(state["samples"], self.global_batch_size)
        if rest:
            raise ConfigurationError(
                f"the saved epoch was left after {state['samples']} samples, which batch_size*dp_size="
                f"{self.global_batch_size} does not divide; use batch_size*dp_size={state['global_batch_size']}"
            )
        self.iteration, self.skip_batches = state["epoch"], position
        self._position = position


def shard_dataloader(
    dataloader: DataLoader, rank: int, world_size: int, device: torch.device, seed: int
) -> ShardedDataLoader:
    """A loader of one rank's shares of what `dataloader` yields.

    Args:
        dataloader: the user's, made alike on all ranks; its `batch_size` is that of one rank.
        rank, world_size: position on the data-parallel axis.
        device: where batches are put.
        seed: of the order of samples where the user gave no generator.
    """
    options = {
        "num_workers": dataloader.num_workers,
        "collate_fn": dataloader.collate_fn,
        "pin_memory": dataloader.pin_memory,
        "timeout": dataloader.timeout,
        "worker_init_fn": dataloader.worker_init_fn,
        "multiprocessing_context": dataloader.multiprocessing_context,
        "persistent_workers": dataloader.persistent_workers,
        "prefetch_factor": dataloader.prefetch_factor,
    }
    if isinstance(dataloader.dataset, IterableDataset):
        if dataloader.batch_size is None:
            raise ConfigurationError(
                "an iterable dataset needs a batch_size to be shared out; use batch_size=1 or more"
            )
        dataset = DataParallelIterable(
            dataloader.dataset, dataloader.batch_size, dataloader.drop_last, rank, world_size
        )
        sharded = ShardedDataLoader(
            dataset, device=device, batch_size=dataloader.batch_size, drop_last=dataloader.drop_last, **options
        )
        sharded.global_batch_size = dataloader.batch_size * world_size
        return sharded
    if dataloader.batch_sampler is None:
        raise ConfigurationError("a DataLoader with batch_size=None cannot be shared out; use batch_size=1 or more")
    sampler = DataParallelBatchSampler(_reproducible(dataloader.batch_sampler, seed), rank, world_size)
    sharded = ShardedDataLoader(dataloader.dataset, device=device, batch_sampler=sampler, **options)
    sharded.batch_size = dataloader.batch_size  # of one replica, as the user set it
    sharded.global_batch_size = (dataloader.batch_size or 1) * world_size
    return sharded


def _reproducible(batch_sampler: BatchSampler, seed: int) -> BatchSampler:
    """The same order on all ranks: a shuffling without a generator of its own gets a seed that depends on the epoch."""
    sampler = getattr(batch_sampler, "sampler", None)
    if type(sampler) is not RandomSampler or sampler.generator is not None:
        return batch_sampler
    seeded = SeedableRandomSampler(
        sampler.data_source, replacement=sampler.replacement, num_samples=sampler._num_samples, data_seed=seed
    )
    return BatchSampler(seeded, batch_sampler.batch_size, batch_sampler.drop_last)


def _even_share(samples: list[Any], rank: int, world_size: int) -> list[Any]:
    return samples[len(samples) * rank // world_size : len(samples) * (rank + 1) // world_size]


def _without_rows(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch[:0]
    if hasattr(batch, "items"):
        return {key: _without_rows(value) for key, value in batch.items()}
    return batch
