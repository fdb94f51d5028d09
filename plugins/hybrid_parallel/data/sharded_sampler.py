"""Sharding of samplers and iterable datasets: each sample is in one replica's share, and the order can be resumed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, get_worker_info

from booster.data import PackedStream
from booster.logging import get_logger
from plugins.hybrid_parallel.data.microbatch import without_rows
from plugins.hybrid_parallel.data.random_stream import LoadingStream, state_of_generator

# A loader cannot collate an empty list. For an empty share it collates one sample so often, and what has so many rows
# or items is emptied: few collators make lists of this length for anything but samples.
STAND_INS = 7


class DataParallelBatchSampler(BatchSampler):
    """Batch sampler that yields this rank's share of each group of `world_size` batches.

    Args:
        batch_sampler: the user's batch sampler, identical on all ranks.
        rank, world_size: position on the data-parallel axis; 0 of 1 if the user's sampler already yields shards.
        stream: random stream for samplers without a generator of their own; None for the default generators.

    Attributes:
        empty_batches: positions of the placeholder batches, which represent an empty share, of the last iteration.
    """

    def __init__(
        self, batch_sampler: BatchSampler, rank: int, world_size: int, stream: LoadingStream | None = None
    ) -> None:
        self.batch_sampler, self.rank, self.world_size, self.stream = batch_sampler, rank, world_size, stream
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", None)
        self.empty_batches: set[int] = set()
        self._begun: Iterator[list[int]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the user's batch sampler, if it has one."""
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)

    def begin(self) -> None:
        """Start the next epoch of the user's sampler now, instead of with its first batch."""
        with self._drawing():
            self._begun = iter(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator: what `begin` has begun belongs to this iteration, also if another begins before its batches.
        begun, self._begun = self._begun, None
        self.empty_batches = set()
        return self._shares(self._batches(begun), self.empty_batches)

    def _shares(self, batches: Iterator[list[int]], empty: set[int]) -> Iterator[list[int]]:
        group: list[list[int]] = []
        position = 0
        for batch in batches:
            group.append(list(batch))
            if len(group) == self.world_size:
                yield self._share(group, position, empty)
                group, position = [], position + 1
        if group and not self.drop_last:
            yield self._share(group, position, empty)

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        return batches // self.world_size if self.drop_last else math.ceil(batches / self.world_size)

    def _batches(self, begun: Iterator[list[int]] | None) -> Iterator[list[int]]:
        """Yield all batches, drawn from the stream: the order is the same on all ranks, whatever the samples draw."""
        batches = iter(self.batch_sampler) if begun is None else begun
        while True:
            with self._drawing():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _drawing(self) -> AbstractContextManager[None]:
        return nullcontext() if self.stream is None else self.stream.active()

    def _share(self, group: list[list[int]], position: int, empty: set[int]) -> list[int]:
        if len({len(batch) for batch in group}) == 1 and len(group) == self.world_size:
            return group[self.rank]
        samples = [index for batch in group for index in batch]
        share = even_share(samples, self.rank, self.world_size)
        if not share:
            empty.add(position)
            return samples[:1] * STAND_INS
        return share


class DataParallelIterable(IterableDataset):
    """Iterable dataset that yields this rank's share of each group of `batch_size * world_size` samples.

    Args:
        dataset: the user's dataset, which yields the same samples on all ranks.
        batch_size: batch size of one rank.
        drop_last: whether to drop a short last group.
        stream: random stream for a dataset without a generator of its own, in this process.

    Attributes:
        base_seed: seed of the corresponding streams in worker processes.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        batch_size: int,
        drop_last: bool,
        rank: int,
        world_size: int,
        stream: LoadingStream,
    ) -> None:
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.rank, self.world_size, self.stream = rank, world_size, stream
        self.base_seed = 0
        self._workers_stream: LoadingStream | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the user's dataset, if it has one."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        group: list[Any] = []
        for sample in self._samples():
            group.append(sample)
            if len(group) == self.batch_size * self.world_size:
                yield from group[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]
                group = []
        if group and not self.drop_last:
            yield from even_share(group, self.rank, self.world_size) or [_Unowned(group[0])]

    def __len__(self) -> int:
        try:
            groups, rest = divmod(len(self.dataset), self.batch_size * self.world_size)
        except TypeError:
            raise TypeError(
                f"a {type(self.dataset).__name__} has no length, and neither has its loader; write for batch in "
                "dataloader: booster.execute_pipeline(batch, model, optimizer=optimizer)"
            ) from None
        of_rest = 0 if self.drop_last else len(even_share(range(rest), self.rank, self.world_size))
        return groups * self.batch_size + (max(1, of_rest) if rest and not self.drop_last else 0)

    def _samples(self) -> Iterator[Any]:
        """Yield all samples, drawn from the stream: they are the same on all ranks, whatever collating draws."""
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
        if self._workers_stream is None:  # a persistent worker continues its stream in the next epoch
            self._workers_stream = LoadingStream.seeded(self.base_seed + worker.id)
        return self._workers_stream


class _Unowned:
    """Placeholder for an empty share: a sample that belongs to another rank."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample


class CollateShare:
    """Wrapper of the user's `collate_fn` that supports empty shares."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: list[Any]) -> Any:
        """Collate this rank's samples; return a batch without rows if it has none."""
        if isinstance(samples[0], _Unowned):
            return without_rows(self.collate_fn([samples[0].sample] * STAND_INS), STAND_INS)
        return self.collate_fn(samples)


def even_share(samples: list[Any], rank: int, world_size: int) -> list[Any]:
    """Return this rank's part of `samples`; the sizes of the parts differ by at most one."""
    return samples[len(samples) * rank // world_size : len(samples) * (rank + 1) // world_size]


_logger = get_logger(__name__)
# Classes whose order follows from generators and `set_epoch` alone, or whose state is not that of an epoch's start.
_KNOWN = ("torch.", "accelerate.", "datasets.")


class OrderObjects:
    """Sampler, batch sampler and iterable dataset of a loader.

    An object with `state_dict` and `load_state_dict` is saved as it was when the epoch began, and repeats the batches
    that were handed out. Another one that changes from epoch to epoch begins again when training is resumed.

    Args:
        batch_sampler: the batch sampler of the boosted loader, over that of the user; None for an iterable dataset.
        dataset: the dataset, or the shares of an iterable one.
    """

    def __init__(self, batch_sampler: Any, dataset: Any, num_workers: int, persistent_workers: bool) -> None:
        self.batch_sampler, self.dataset = batch_sampler, dataset
        self.num_workers, self.persistent_workers = num_workers, persistent_workers
        self._has_warned = False
        self._as_given = {role: _attributes(each) for role, each in self._without_state()}

    @property
    def sampler(self) -> Any:
        """The user's sampler, or None."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def num_samples(self) -> int | None:
        """Number of samples of the dataset; None for one without a length."""
        has_length = isinstance(self.dataset, Sized) and not isinstance(self.dataset, IterableDataset)
        return len(self.dataset) if has_length else None

    def state(self) -> dict[str, Any]:
        """Return the states of the objects that have one, by role."""
        return {role: each.state_dict() for role, each in self._objects() if _is_stateful(each)}

    def load(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        for role, each in self._objects():
            if role in state and _is_stateful(each):
                each.load_state_dict(state[role])

    def entry(self, samples: int) -> dict[str, Any] | None:
        """Return what `enter` needs to go on behind `samples` of the epoch; None if they have to be loaded again."""
        entered = self._entered()
        return None if entered is None else entered.place_of(samples)

    def enter(self, entry: dict[str, Any] | None) -> bool:
        """Let the next iteration begin at an `entry`; return whether there is one."""
        entered = self._entered()
        if entry is None or entered is None:
            return False
        entered.go_to(entry)
        return True

    def _entered(self) -> PackedStream | None:
        dataset = getattr(self.dataset, "dataset", None)
        return dataset if isinstance(dataset, PackedStream) else None

    def warn_of_unsaved(self, epoch: int) -> None:
        """Say once what decides the order of samples from this epoch on, and is not in the loader's state."""
        if self._has_warned:
            return
        changed = [role for role, each in self._without_state() if _attributes(each) != self._as_given.get(role)]
        if isinstance(self.dataset, IterableDataset) and self.persistent_workers and epoch:
            changed.append("dataset, in persistent workers,")
        if changed:
            self._has_warned = True
            _logger.warning(
                "the %s of the loader keeps a state of its own between epochs, which is not saved: after a resume its "
                "order begins again; give it state_dict() and load_state_dict(), or draw the order from set_epoch()",
                changed[0],
            )

    def _objects(self) -> Iterator[tuple[str, Any]]:
        yield "sampler", self.sampler
        yield "batch_sampler", getattr(self.batch_sampler, "batch_sampler", None)
        if isinstance(self.dataset, DataParallelIterable) and not self.num_workers:
            yield "dataset", self.dataset.dataset

    def _without_state(self) -> Iterator[tuple[str, Any]]:
        objects = dict(self._objects())
        if _is_stateful(objects["batch_sampler"]):
            del objects["sampler"]  # the state of the batch sampler has that of its sampler
        for role, each in objects.items():
            if each is not None and not _is_known(each) and not _is_stateful(each):
                yield role, each


def _is_known(each: Any) -> bool:
    return type(each).__module__.startswith(_KNOWN)


def _is_stateful(each: Any) -> bool:
    return not _is_known(each) and hasattr(each, "state_dict") and hasattr(each, "load_state_dict")


def _attributes(each: Any) -> dict[str, Any]:
    """Return the numbers, texts and generator states among the attributes of an object, to be compared."""
    found: dict[str, Any] = {}
    for name, value in getattr(each, "__dict__", {}).items():
        if name == "epoch" and hasattr(each, "set_epoch"):
            continue
        if isinstance(value, bool | int | float | str):
            found[name] = value
        elif isinstance(value, torch.Generator) and name != "generator":  # that of a sampler is saved
            found[name] = state_of_generator(value.get_state())
        elif isinstance(value, random.Random):
            found[name] = value.getstate()
        elif hasattr(value, "bit_generator"):  # of numpy
            found[name] = repr(value.bit_generator.state)
    return found
