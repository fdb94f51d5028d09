"""Data loaders that give each data-parallel rank its share of every global batch.

A global batch is `batch_size * dp_size` consecutive samples, and rank r's share its r-th part. The last one of an
epoch may be short: it is split as evenly as possible and nothing is repeated, so that a rank's share may be empty.
The order of the samples is that of torch's loader: a base seed is drawn first, then what the sampler draws, from the
user's generator or from a stream that all loaders of a plugin share. Training can be resumed in the middle of an epoch:
batches that were handed out are loaded and dropped, which draws what was drawn the first time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, IterableDataset

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

_OPTIONS = (
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


class ShardedDataLoader(DataLoaderShard):
    """A loader of this rank's shares; `state_dict` knows how far an epoch has come.

    Attributes:
        global_batch_size: samples of a batch over all data-parallel ranks; without a known batch size, of those ranks.
        order: what orders are drawn from where the user gave no generator.
        draws_from: the generator of the user's loader, for base seeds; None for `order`.
        rank: what loading a sample draws depends on it, and on the base seed.
        iterations: how often it was iterated.
        collate: watches what collating draws.
    """

    global_batch_size = 1
    order: LoadingStream
    draws_from: torch.Generator | None = None
    rank = 0
    iterations = 0
    collate: ReplicaCollate | None = None
    _position = 0  # batches of this epoch that were handed out
    _base_seed: int | None = None
    _order_at_start: dict[str, Any] | None = None  # when this epoch began
    _order_to_come: dict[str, Any] | None = None  # behind what is drawn once more after resuming
    _is_open = False  # whether an epoch has begun, and its iterator has not ended

    def __iter__(self) -> Iterator[Any]:
        self._move_to(self.epoch)
        self._position, self.skip_batches = self.skip_batches, 0
        self._order_at_start = self._order_state()
        self._is_open = True
        self.iterations += 1
        self._draw()
        return self._batches(LoadingStream.derived(self._base_seed, "samples", self.iteration, self.rank))

    def _draw(self) -> None:
        """Draw what torch draws when a loader is iterated. A sampler draws the rest with its first batch."""
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
            if self.collate is not None:
                self.collate.begin()
        for number in itertools.count():
            if number == self._position and self._order_to_come is not None:
                self._load_order(self._order_to_come)
                self._order_to_come = None
            with stream.active():
                batch = next(loaded, end)
            if batch is end:
                break
            if number < self._position:  # handed out by the run before this one
                continue
            batch = send_to_device(batch, self.device, non_blocking=True)
            self._position += 1
            yield without_rows(batch) if number in empty else batch
        self.iteration += 1
        self._position, self._is_open = 0, False

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
        """Tell a sampler or dataset that has `set_epoch` of the epoch that begins with the next iteration.

        Left to the user, as with torch's loader.
        """
        self._move_to(epoch)
        super().set_epoch(epoch)

    def _move_to(self, epoch: int) -> None:
        if epoch != self.iteration:
            self.iteration, self._position, self.skip_batches = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Epoch, and samples of it that are done on all ranks together: they do not depend on the layout."""
        present = self._order_state()
        return {
            "epoch": self.epoch,
            "samples": self.position * self.global_batch_size,
            "global_batch_size": self.global_batch_size,
            "order": self._order_at_start if self._is_open and not self._is_over else present,
            "order_to_come": (self._order_to_come or present) if self.position else None,
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
        """Those of the user's loader and of its sampler, where there are any."""
        found = {"loader": self.draws_from, "sampler": getattr(self._sampler, "generator", None)}
        return {name: each for name, each in found.items() if isinstance(each, torch.Generator)}

    def _order_state(self) -> dict[str, Any]:
        """What the order of the next samples depends on, as JSON."""
        state = {
            "stream": self.order.state_dict(),
            "generators": {name: state_of_generator(each.get_state()) for name, each in self._generators().items()},
        }
        return state | ({"sampler": self._sampler.state_dict()} if hasattr(self._sampler, "state_dict") else {})

    def _load_order(self, state: dict[str, Any]) -> None:
        """But for the state of a sampler, which is its position."""
        if "stream" in state:
            self.order.load_state_dict(state["stream"])
        for name, generator in self._generators().items():
            if name in state.get("generators", {}):
                generator.set_state(generator_state(state["generators"][name]))


def shard_dataloader(
    dataloader: DataLoader, rank: int, world_size: int, device: torch.device, order: LoadingStream
) -> ShardedDataLoader:
    """A loader of one rank's shares of what `dataloader` yields; one that is such a loader already is returned.

    Args:
        dataloader: the user's, made alike on all ranks; its `batch_size` is that of one rank.
        rank, world_size: position on the data-parallel axis.
        device: where batches are put.
        order: what the order of samples is drawn from where the user gave no generator; alike on all ranks.

    Raises:
        ConfigurationError: it cannot be shared out, or was in a way that is not that of the layout.
    """
    if isinstance(dataloader, ShardedDataLoader):
        return dataloader
    check_shareable(dataloader, rank, world_size)
    options = {name: getattr(dataloader, name) for name in _OPTIONS if hasattr(dataloader, name)}
    ordering = (dataloader.generator, dataloader.sampler, dataloader.batch_sampler)
    collate = ReplicaCollate(dataloader.collate_fn, dataloader.dataset, ordering, rank, world_size)
    options["collate_fn"] = collate
    if isinstance(dataloader.dataset, IterableDataset):
        dataset = DataParallelIterable(
            dataloader.dataset, dataloader.batch_size, dataloader.drop_last, rank, world_size
        )
        dataset.stream, options["collate_fn"] = order, CollateShare(collate)
        sharded = ShardedDataLoader(
            dataset, device=device, batch_size=dataloader.batch_size, drop_last=dataloader.drop_last, **options
        )
    else:
        place = (0, 1) if is_shared_out(dataloader) else (rank, world_size)
        sampler = DataParallelBatchSampler(dataloader.batch_sampler, *place)
        sampler.stream = order
        sharded = ShardedDataLoader(dataloader.dataset, device=device, batch_sampler=sampler, **options)
        sharded.batch_size = dataloader.batch_size  # of one replica, as the user set it
    sharded.global_batch_size = (dataloader.batch_size or 1) * world_size
    sharded.order, sharded.draws_from, sharded.rank = order, dataloader.generator, rank
    sharded.collate = collate
    return sharded


def shard_dataloader_alike(dataloader: DataLoader, mesh: HybridMesh, order: LoadingStream) -> ShardedDataLoader:
    """The same on all ranks of the grid, which have to give the same data.

    Raises:
        ConfigurationError: see `shard_dataloader`, or their data differ; on all ranks alike.
    """
    place, group = (mesh.rank("dp"), mesh.size("dp")), control_group()
    sharded = raise_on_all_ranks(lambda: shard_dataloader(dataloader, *place, mesh.device, order), group)
    if sharded is not dataloader:
        check_same_data(dataloader, group)
    return sharded
