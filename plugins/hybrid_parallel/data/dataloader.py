"""Data loaders that give each data-parallel rank its share of every global batch.

A global batch is `batch_size * dp_size` consecutive samples; the share of rank r is its r-th part. The last global
batch of an epoch may be short: it is split as evenly as possible and no sample is repeated, so the share of a rank may
be empty.

The order of the samples is that of torch's loader: first a base seed is drawn, then the sampler draws, from the user's
generator or from a stream that all loaders of a plugin share. Training can resume in the middle of an epoch: batches
that were already handed out are loaded and dropped, which repeats their random draws.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, Dataset, IterableDataset

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.agreement import check_same_data, check_shareable, is_shared_out
from plugins.hybrid_parallel.data.random_draws import ReplicaCollate
from plugins.hybrid_parallel.data.random_stream import LoadingStream, generator_state, state_of_generator
from plugins.hybrid_parallel.data.shares import (
    CollateShare,
    DataParallelBatchSampler,
    DataParallelIterable,
    without_rows,
)
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.distributed.mesh import HybridMesh, control_group

LOADER_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "persistent_workers",
    "prefetch_factor",
    "in_order",
)


@dataclass(frozen=True)
class ReplicaShare:
    """What a loader of one replica's shares must know besides the options of torch's loader.

    Attributes:
        batch_size: samples of a batch of this replica; None if it is unknown.
        rank, world_size: position on the data-parallel axis; the rank seeds the random draws of samples together with
            the base seed.
        order: random stream of the sample order if the user gave no generator.
        draws_from: generator of the user's loader, for base seeds; None to use `order`.
        collate: collate function, which also checks for random draws.
    """

    batch_size: int | None
    rank: int
    world_size: int
    order: LoadingStream
    draws_from: torch.Generator | None
    collate: ReplicaCollate


class ShardedDataLoader(DataLoaderShard):
    """Loader of this rank's shares; `state_dict` includes the position in the epoch.

    Args:
        dataset: the user's dataset, or its shares if it is iterable.
        share: which share of the batches this is.
        options: options of `DataLoaderShard`.

    Attributes:
        global_batch_size: samples of a batch over all data-parallel ranks; `dp_size` if the batch size is unknown.
        iterations: number of times that the loader was iterated.
        given: the user's loader.
        longest: tokens of the longest sample that was handed out; 0 before there was one.
    """

    iterations = longest = 0
    given: DataLoader
    _position = 0  # number of batches of this epoch that were handed out
    _base_seed: int | None = None
    _order_at_start: dict[str, Any] | None = None  # state of the order when this epoch began
    _order_to_come: dict[str, Any] | None = None  # state to set after the draws that are repeated on resume
    _is_open = False  # whether an epoch has begun, and its iterator has not ended

    def __init__(self, dataset: Dataset, share: ReplicaShare, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.batch_size = share.batch_size
        self.global_batch_size = (share.batch_size or 1) * share.world_size
        self.rank, self.order, self.draws_from, self.collate = share.rank, share.order, share.draws_from, share.collate

    def __iter__(self) -> Iterator[Any]:
        self._move_to(self.epoch)
        self._position, self.skip_batches = self.skip_batches, 0
        self._order_at_start = self._order_state()
        self._is_open = True
        self.iterations += 1
        self._draw()
        return self._batches(LoadingStream.derived(self._base_seed, "samples", self.iteration, self.rank))

    def _draw(self) -> None:
        """Draw what torch draws when a loader is iterated; a sampler draws the rest with its first batch."""
        if isinstance(self.batch_sampler, DataParallelBatchSampler):
            self.batch_sampler.begin()
        if self._base_seed is None or not self.persistent_workers:
            with self.order.active():
                drawn = torch.empty((), dtype=torch.int64).random_(generator=self.draws_from)
            self._base_seed = int(drawn)
        if isinstance(self.dataset, DataParallelIterable):
            self.dataset.base_seed = self._base_seed

    def _batches(self, stream: LoadingStream) -> Iterator[Any]:
        empty = getattr(self.batch_sampler, "empty_batches", ())
        with stream.active():
            loaded, end = iter(self.base_dataloader), object()
            self.collate.begin()
        for number in itertools.count():
            if number == self._position and self._order_to_come is not None:
                self._load_order(self._order_to_come)
                self._order_to_come = None
            with stream.active():
                batch = next(loaded, end)
            if batch is end:
                break
            if number < self._position:  # handed out by the previous run
                continue
            batch = send_to_device(batch, self.device, non_blocking=True)
            self._position += 1
            if isinstance(batch, Mapping) and "input_ids" in batch:
                self.longest = max(self.longest, batch["input_ids"].shape[-1])
            yield without_rows(batch) if number in empty else batch
        self.iteration += 1
        self._position, self._is_open = 0, False

    @property
    def epoch(self) -> int:
        """The current epoch; an epoch whose batches were all handed out is over."""
        return self.iteration + self._is_over

    @property
    def position(self) -> int:
        """Number of batches of this epoch that were handed out, including those of a previous run."""
        return 0 if self._is_over else self._position

    @property
    def _is_over(self) -> bool:
        """Whether all batches of the epoch were handed out.

        A loop that takes exactly `len(loader)` batches leaves the iterator just before its end.
        """
        return not isinstance(self.dataset, IterableDataset) and 0 < self._position == len(self)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, also in a sampler or dataset that has `set_epoch`.

        The user has to call it, as with torch's loader.
        """
        self._move_to(epoch)
        super().set_epoch(epoch)

    def _move_to(self, epoch: int) -> None:
        if epoch != self.iteration:
            self.iteration, self._position, self.skip_batches = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sample order and the position in the epoch.

        The position is the number of samples that all ranks together have processed, so it does not depend on the
        layout.
        """
        present = self._order_state()
        return {
            "epoch": self.epoch,
            "samples": self.position * self.global_batch_size,
            "global_batch_size": self.global_batch_size,
            "order": self._order_at_start if self._is_open and not self._is_over else present,
            "order_to_come": (self._order_to_come or present) if self.position else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue where the saved one stopped.

        Raises:
            ConfigurationError: the saved position is not at a batch boundary of this loader.
        """
        position, rest = divmod(state["samples"], self.global_batch_size)
        if rest:
            raise ConfigurationError(
                f"the saved epoch was left after {state['samples']} samples, which batch_size*dp_size="
                f"{self.global_batch_size} does not divide; use batch_size*dp_size={state['global_batch_size']}"
            )
        self.iteration, self.skip_batches = state["epoch"], position
        self._position, self._base_seed = position, None
        self._order_at_start, self._order_to_come = state.get("order", {}), state.get("order_to_come")
        self._load_order(self._order_at_start)
        sampler = self._sampler
        if "sampler" in self._order_at_start and hasattr(sampler, "load_state_dict"):
            sampler.load_state_dict(self._order_at_start["sampler"])

    @property
    def _sampler(self) -> Any:
        return getattr(self.batch_sampler, "sampler", None)

    def _generators(self) -> dict[str, torch.Generator]:
        """Return the generators of the user's loader and its sampler, if there are any."""
        found = {"loader": self.draws_from, "sampler": getattr(self._sampler, "generator", None)}
        return {name: each for name, each in found.items() if isinstance(each, torch.Generator)}

    def _order_state(self) -> dict[str, Any]:
        """Return the state that determines the order of the next samples, as JSON."""
        state = {
            "stream": self.order.state_dict(),
            "generators": {name: state_of_generator(each.get_state()) for name, each in self._generators().items()},
        }
        return state | ({"sampler": self._sampler.state_dict()} if hasattr(self._sampler, "state_dict") else {})

    def _load_order(self, state: dict[str, Any]) -> None:
        """Restore the order, except the state of a stateful sampler, which also contains its position."""
        if "stream" in state:
            self.order.load_state_dict(state["stream"])
        for name, generator in self._generators().items():
            if name in state.get("generators", {}):
                generator.set_state(generator_state(state["generators"][name]))


def shard_dataloader(
    dataloader: DataLoader, rank: int, world_size: int, device: torch.device, order: LoadingStream
) -> ShardedDataLoader:
    """Return a loader of one rank's shares of `dataloader`; a loader that is already sharded is returned unchanged.

    Args:
        dataloader: the user's loader, created identically on all ranks; its `batch_size` is per rank.
        rank, world_size: position on the data-parallel axis.
        device: device on which batches are placed.
        order: random stream of the sample order if the user gave no generator; the same on all ranks.

    Raises:
        ConfigurationError: the loader cannot be sharded, or is sharded differently from the layout.
    """
    if isinstance(dataloader, ShardedDataLoader):
        return dataloader
    check_shareable(dataloader, rank, world_size)
    options = {name: getattr(dataloader, name) for name in LOADER_OPTIONS if hasattr(dataloader, name)}
    ordering = (dataloader.generator, dataloader.sampler, dataloader.batch_sampler)
    collate = ReplicaCollate(dataloader.collate_fn, dataloader.dataset, ordering, rank, world_size)
    share = ReplicaShare(dataloader.batch_size, rank, world_size, order, dataloader.generator, collate)
    options |= {"device": device, "collate_fn": collate}
    if isinstance(dataloader.dataset, IterableDataset):
        sizes = {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
        dataset = DataParallelIterable(dataloader.dataset, **sizes, rank=rank, world_size=world_size, stream=order)
        return ShardedDataLoader(dataset, share, **{**options, **sizes, "collate_fn": CollateShare(collate)})
    place = (0, 1) if is_shared_out(dataloader) else (rank, world_size)
    sampler = DataParallelBatchSampler(dataloader.batch_sampler, *place, order)
    return ShardedDataLoader(dataloader.dataset, share, batch_sampler=sampler, **options)


def shard_dataloader_alike(dataloader: DataLoader, mesh: HybridMesh, order: LoadingStream) -> ShardedDataLoader:
    """Call `shard_dataloader` on all ranks of the mesh, and check that their data is the same.

    Raises:
        ConfigurationError: see `shard_dataloader`, or the data differs; raised on all ranks.
    """
    place, group = (mesh.rank("dp"), mesh.size("dp")), control_group()
    sharded = raise_on_all_ranks(lambda: shard_dataloader(dataloader, *place, mesh.device, order), group)
    if sharded is not dataloader:
        sharded.given = dataloader
        check_same_data(dataloader, group)
    return sharded
