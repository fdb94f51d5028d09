"""Data loaders that give each data-parallel rank its share of every global batch.

A global batch is `batch_size * dp_size` consecutive samples, and rank r's share its r-th part. The last one of an
epoch may be short: it is split as evenly as possible and nothing is repeated, so that a rank's share may be empty.
Device placement, epochs and skipping ahead are accelerate's. What a batch holds depends on the seed, the epoch and the
replica alone, so that training can be resumed in the middle of an epoch: skipped batches are loaded and dropped, which
draws what was drawn the first time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.loading_stream import LoadingStream


class DataParallelBatchSampler(BatchSampler):
    """This rank's share of groups of `dp_size` batches.

    Args:
        batch_sampler: the user's, the same on all ranks.
        rank, world_size: position on the data-parallel axis.

    Attributes:
        empty_batches: positions of this epoch's batches that stand for an empty share.
        stream: what a sampler without a generator of its own draws from.
    """

    def __init__(self, batch_sampler: BatchSampler, rank: int, world_size: int) -> None:
        self.batch_sampler, self.rank, self.world_size = batch_sampler, rank, world_size
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", None)
        self.empty_batches: set[int] = set()
        self.stream: LoadingStream | None = None

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
        batches = iter(self.batch_sampler)
        while True:
            with self.stream.active() if self.stream is not None else nullcontext():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

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
        seed, rank: what loading draws depends on these, and on the epoch.
    """

    global_batch_size = 1
    seed = 0
    rank = 0
    _position = 0  # batches of this epoch that were handed out
    _sampler_at_start: dict[str, Any] | None = None  # when this epoch began

    def __iter__(self) -> Iterator[Any]:
        empty = getattr(self.batch_sampler, "empty_batches", ())
        self.set_epoch(self.epoch)
        self._position = self.skip_batches
        self._sampler_at_start = self._sampler_state()
        stream = LoadingStream(self.seed, "samples", self.iteration, self.rank)
        if isinstance(self.batch_sampler, DataParallelBatchSampler):
            self.batch_sampler.stream = LoadingStream(self.seed, "order", self.iteration)
        batches, end = super().__iter__(), object()
        while True:
            with stream.active():
                batch = next(batches, end)
            if batch is end:
                break
            self._position += 1
            yield _without_rows(batch) if self._position - 1 in empty else batch
        self._position = self.skip_batches = 0

    @property
    def epoch(self) -> int:
        """The epoch that training is in; one whose batches were all handed out is over."""
        return self.iteration + self._is_over

    @property
    def position(self) -> int:
        """Batches of this epoch that were handed out, also by a run before this one."""
        return 0 if self._is_over else self._position

    @property
    def _is_over(self) -> bool:
        """A loop that asks for `len(loader)` batches leaves its iterator just before its end."""
        return not isinstance(self.dataset, IterableDataset) and 0 < self._position == len(self)

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch with the next iteration, or stay in this one."""
        if epoch != self.iteration:
            self._position = self.skip_batches = 0
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Epoch, and samples of it that are done on all ranks together: they do not depend on the layout."""
        return {
            "epoch": self.epoch,
            "samples": self.position * self.global_batch_size,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            "sampler": self._sampler_at_start if self.position else self._sampler_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
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
        self.seed = state.get("seed", self.seed)
        self._sampler_at_start = state.get("sampler", {})
        self._load_sampler_state(self._sampler_at_start)

    def _sampler_state(self) -> dict[str, Any]:
        """What the order of the next epoch depends on beside its number."""
        sampler = getattr(self.batch_sampler, "sampler", None)
        if isinstance(sampler, SeedableRandomSampler):
            return {"seed": sampler.initial_seed}
        generator = getattr(sampler, "generator", None)
        state = {} if generator is None else {"generator": generator.get_state().numpy().tobytes().hex()}
        return state | ({"state": sampler.state_dict()} if hasattr(sampler, "state_dict") else {})

    def _load_sampler_state(self, state: dict[str, Any]) -> None:
        sampler = getattr(self.batch_sampler, "sampler", None)
        if "seed" in state and isinstance(sampler, SeedableRandomSampler):
            sampler.initial_seed = state["seed"]
        elif "generator" in state and getattr(sampler, "generator", None) is not None:
            sampler.generator.set_state(torch.frombuffer(bytearray.fromhex(state["generator"]), dtype=torch.uint8))
        if "state" in state and hasattr(sampler, "load_state_dict"):
            sampler.load_state_dict(state["state"])


def shard_dataloader(
    dataloader: DataLoader, rank: int, world_size: int, device: torch.device, seed: int
) -> ShardedDataLoader:
    """A loader of one rank's shares of what `dataloader` yields.

    Args:
        dataloader: the user's, made alike on all ranks; its `batch_size` is that of one rank.
        rank, world_size: position on the data-parallel axis.
        device: where batches are put.
        seed: of the order of samples where the user gave no generator, and of what loading them draws.
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
        sharded.seed, sharded.rank = seed, rank
        return sharded
    if dataloader.batch_sampler is None:
        raise ConfigurationError("a DataLoader with batch_size=None cannot be shared out; use batch_size=1 or more")
    sampler = DataParallelBatchSampler(_reproducible(dataloader.batch_sampler, seed), rank, world_size)
    sharded = ShardedDataLoader(dataloader.dataset, device=device, batch_sampler=sampler, **options)
    sharded.batch_size = dataloader.batch_size  # of one replica, as the user set it
    sharded.global_batch_size = (dataloader.batch_size or 1) * world_size
    sharded.seed, sharded.rank = seed, rank
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
    if isinstance(batch, tuple | list):
        return [_without_rows(value) for value in batch]
    return batch
