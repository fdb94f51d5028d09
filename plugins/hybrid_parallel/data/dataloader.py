"""Data loaders that give each data-parallel rank its share of every global batch.

A global batch is `batch_size * dp_size` consecutive samples; the share of rank r is its r-th part. The last global
batch of an epoch may be short: it is split as evenly as possible and no sample is repeated, so the share of a rank may
be empty. Ranks must have the same data; loaders that share it out themselves are refused.

The order of the samples is that of torch's loader: first a base seed is drawn, then the sampler draws, from the user's
generator or from a stream that all loaders of a plugin share. Training can resume in the middle of an epoch: batches
that were already handed out are loaded and dropped, which repeats their random draws. Packed streams are entered where
they were left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from booster.data import PackingCollator
from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.data import sharded_sampler
from plugins.hybrid_parallel.data.checks import ReplicaCheck, check_same_data, check_shareable, is_shared_out
from plugins.hybrid_parallel.data.microbatch import without_rows
from plugins.hybrid_parallel.data.random_stream import LoadingStream, OrderStream, ReplicaCollate
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.distributed.mesh import HybridMesh, control_group
from shardformer.distributed.process_groups import broadcast_json
from shardformer.utils.typed_json import from_json, to_json

if TYPE_CHECKING:
    from plugins.hybrid_parallel.data.dataloader import ShardedDataLoader

_log = get_logger(__name__)

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
    """What a loader of one replica's shares must know besides the options of torch's loader."""

    batch_size: int | None  # samples of a batch of this replica; None if it is unknown
    # rank, world_size: position on the data-parallel axis; the rank seeds the random draws of samples together with the
    # base seed
    rank: int
    world_size: int
    order: OrderStream  # random stream of the sample order if the user gave no generator
    draws_from: torch.Generator | None  # generator of the user's loader, for base seeds; None to use `order`
    collate: ReplicaCollate  # collate function, which also checks for random draws


@dataclass
class _Place:
    """Where an iteration of a loader is, and what it takes to begin it again."""

    epoch: int = 0
    position: int = 0  # batches that were handed out, including those of a previous run
    # number of the first batch that the dataset yields; earlier ones of a previous run are not loaded again
    first: int = 0
    # state of the order of samples before this epoch was drawn; None before it has begun
    order: dict[str, Any] | None = None
    # state of the order to set once the draws of `position` batches are repeated
    order_to_come: dict[str, Any] | None = None
    base_seed: int | None = None  # base seed that the epoch took over from persistent workers; None if it drew one
    has_ended: bool = False  # whether the iteration has found the end


class ShardedDataLoader(DataLoaderShard):
    """Loader of this rank's shares; `state_dict` includes the position in the epoch.

    Several iterations may be under way. The state is that of the one that has handed out the last batch, of those
    that are still held.

    Args:
        dataset: the user's dataset, or its shares if it is iterable.
        share: which share of the batches this is.

    Attributes:
        global_batch_size: samples of a batch over all data-parallel ranks; `dp_size` if the batch size is unknown.
        on_iteration: called when the loader is iterated.
        longest: tokens of the longest sample that was handed out; 0 before there was one.
    """

    longest = 0
    given: DataLoader
    on_iteration: Callable[[], None] | None = None
    _base_seed: int | None = None

    def __init__(self, dataset: Dataset, share: ReplicaShare, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.batch_size = share.batch_size
        self.global_batch_size = (share.batch_size or 1) * share.world_size
        self.rank, self.order, self.draws_from, self.collate = share.rank, share.order, share.draws_from, share.collate
        self._last = _Place()  # of the iteration that has handed out the last batch
        self._under_way: list[weakref.ref[_Batches]] = []  # in the order of their last batches
        self._loaded: _Place | None = None  # where the next iteration continues
        self._order_objects = sharded_sampler.OrderObjects(
            self.batch_sampler, dataset, self.num_workers, self.persistent_workers
        )

    def __iter__(self) -> Iterator[Any]:
        self._move_to(self.epoch)
        loaded, self._loaded = self._loaded, None
        place = _Place(self.iteration, self.skip_batches, order=self._order_state())
        self.skip_batches = 0
        if loaded is not None:
            self._base_seed = place.base_seed = loaded.base_seed
            place.first, place.order_to_come = loaded.first, loaded.order_to_come
        elif self.persistent_workers:
            place.base_seed = self._base_seed
        if self.on_iteration is not None:
            self.on_iteration()
        with self.order.leading():
            self._draw(place)
            return _Batches(self, place)

    def _draw(self, place: _Place) -> None:
        """Draw what torch draws when a loader is iterated; a sampler draws the rest with its first batch."""
        if isinstance(self.batch_sampler, sharded_sampler.DataParallelBatchSampler):
            self.batch_sampler.begin()
        if place.base_seed is None:
            with self.order.active():
                drawn = torch.empty((), dtype=torch.int64).random_(generator=self.draws_from)
            self._base_seed = int(drawn)
        if isinstance(self.dataset, sharded_sampler.DataParallelIterable):
            self.dataset.base_seed = self._base_seed

    def note_batch(self, batches: _Batches, batch: Any = None) -> None:
        """Take over the place of an iteration, which has begun, or has handed out `batch`."""
        self._under_way = [each for each in self._under_way if each() not in (None, batches)]
        self._under_way.append(weakref.ref(batches))
        self._last = batches.place
        if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
            self.longest = max(self.longest, batch["input_ids"].shape[-1])

    def note_end(self, batches: _Batches) -> None:
        """Leave an iteration that has found the end of its epoch."""
        self._under_way = [each for each in self._under_way if each() not in (None, batches)]
        self._last, self.iteration = batches.place, batches.place.epoch + 1

    @property
    def _place(self) -> _Place:
        held = [each for each in (reference() for reference in self._under_way) if each is not None]
        return held[-1].place if held else self._last

    @property
    def epoch(self) -> int:
        """The current epoch; an epoch whose batches were all handed out is over."""
        return self._place.epoch + self._is_over

    @property
    def position(self) -> int:
        """Number of batches of this epoch that were handed out, including those of a previous run."""
        return 0 if self._is_over else self._place.position

    @property
    def _is_over(self) -> bool:
        """Whether all batches were handed out; `len(loader)` of them leave the iterator just before its end."""
        place = self._place
        return place.has_ended or (not isinstance(self.dataset, IterableDataset) and 0 < place.position == len(self))

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, as the user has to, also in a sampler or dataset that has `set_epoch`."""
        self._move_to(epoch)
        super().set_epoch(epoch)

    def _move_to(self, epoch: int) -> None:
        if epoch != self.iteration:
            self.iteration, self.skip_batches, self._loaded = epoch, 0, None
        if epoch != self._place.epoch:
            self._last, self._under_way = _Place(epoch), []

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sample order and the position in the epoch, as JSON.

        The position is the number of samples that all ranks together have processed, so it does not depend on the
        layout.
        """
        self._order_objects.warn_of_unsaved(self.epoch)
        place, present = self._place, self._order_state()
        is_open = place.order is not None and not self._is_over
        state = {
            "epoch": self.epoch,
            "samples": self.position * self.global_batch_size,
            "global_batch_size": self.global_batch_size,
            "dataset": self._order_objects.num_samples,
            "base_seed": place.base_seed if is_open else self._base_seed if self.persistent_workers else None,
            "order": place.order if is_open else present,
            "order_to_come": (place.order_to_come or present) if self.position else None,
            "entry": self._order_objects.entry(place.position * self.global_batch_size) if is_open else None,
        }
        return to_json(state, "dataloader.state_dict()")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue where the saved one stopped."""
        state = from_json(state)
        position, rest = divmod(state["samples"], self.global_batch_size)
        if rest:
            raise ConfigurationError(
                f"the saved epoch was left after {state['samples']} samples, which batch_size*dp_size="
                f"{self.global_batch_size} does not divide; use batch_size*dp_size={state['global_batch_size']}"
            )
        now = self._order_objects.num_samples
        before = state.get("dataset", now)
        if position and before != now:
            raise ConfigurationError(
                f"the saved epoch was left after {state['samples']} samples of a dataset of {before}, and this one has "
                f"{now}; give the same dataset, or leave the loader out to begin an epoch"
            )
        self.iteration, self.skip_batches, self._under_way = state["epoch"], position, []
        order, to_come = state.get("order", {}), state.get("order_to_come")
        self.load_order(order)
        self._order_objects.load(order)
        is_entered = self._order_objects.enter(state.get("entry"))
        first, to_come = (position, None) if is_entered else (0, to_come)
        self._last = self._loaded = _Place(state["epoch"], position, first, order, to_come, state.get("base_seed"))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copies and pickles."""
        raise ConfigurationError("a boosted loader cannot be copied or pickled; boost a copy of the DataLoader itself")

    def _generators(self) -> dict[str, torch.Generator]:
        """Return the generators of the user's loader and its sampler, if there are any."""
        found = {"loader": self.draws_from, "sampler": getattr(self._order_objects.sampler, "generator", None)}
        return {name: each for name, each in found.items() if isinstance(each, torch.Generator)}

    def _order_state(self) -> dict[str, Any]:
        """Return the state that determines the order of the next samples."""
        return {
            "stream": self.order.state_dict(),
            "generators": {name: each.get_state() for name, each in self._generators().items()},
            **self._order_objects.state(),
        }

    def load_order(self, state: dict[str, Any]) -> None:
        """Restore the order, except states of the user's objects, which also contain their positions."""
        if "stream" in state:
            self.order.load_state_dict(state["stream"])
        for name, generator in self._generators().items():
            if name in state.get("generators", {}):
                generator.set_state(state["generators"][name])


class _Batches:
    """One iteration over a loader, with a position of its own."""

    def __init__(self, loader: ShardedDataLoader, place: _Place) -> None:
        self.loader, self.place = loader, place
        self._number, self._to_skip = place.first, place.position
        own = LoadingStream.derived(loader._base_seed, "samples", place.epoch, loader.rank)
        self._stream = loader.order if loader.collate.draws_plainly else own
        with own.active():  # torch draws a base seed once more
            self._loaded = iter(loader.base_dataloader)
            loader.collate.begin(id(self))
        self._empty = getattr(loader.batch_sampler, "empty_batches", ())
        loader.note_batch(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            if self._number == self._to_skip and self.place.order_to_come is not None:
                self.loader.load_order(self.place.order_to_come)
                self.place.order_to_come = None
            number, self._number = self._number, self._number + 1
            try:
                with self.loader.order.leading(), self._stream.active():
                    self.loader.collate.begin(id(self))
                    batch = next(self._loaded)
            except StopIteration:
                self.place.has_ended, self.place.order = True, None
                self.loader.note_end(self)
                raise
            if number >= self._to_skip:  # else handed out by the previous run
                break
        batch = without_rows(batch, sharded_sampler.STAND_INS) if number in self._empty else batch
        batch = send_to_device(batch, self.loader.device, non_blocking=True)
        self.place.position += 1
        self.loader.note_batch(self, batch)
        return batch


def shard_dataloader(
    dataloader: DataLoader, rank: int, world_size: int, device: torch.device, order: OrderStream
) -> ShardedDataLoader:
    """Return a loader of one rank's shares of `dataloader`; a loader that is already sharded is returned unchanged.

    Args:
        dataloader: the user's loader, created identically on all ranks; its `batch_size` is per rank.
        order: random stream of the sample order if the user gave no generator; the same on all ranks.

    Raises:
        ConfigurationError: the loader cannot be sharded, or is sharded differently from the layout.
    """
    if isinstance(dataloader, ShardedDataLoader):
        return dataloader
    check_shareable(dataloader, rank, world_size)
    options = {name: getattr(dataloader, name) for name in LOADER_OPTIONS if hasattr(dataloader, name)}
    ordering = (dataloader.generator, dataloader.sampler, dataloader.batch_sampler)
    place = rank, world_size
    collate = ReplicaCollate(dataloader.collate_fn, dataloader.dataset, ordering, *place, dataloader.num_workers)
    share = ReplicaShare(dataloader.batch_size, rank, world_size, order, dataloader.generator, collate)
    options |= {"device": device, "collate_fn": collate}
    if isinstance(dataloader.collate_fn, PackingCollator) and device.type == "cuda":
        options["pin_memory"] = True  # rows are made here, so that no script names them
    if isinstance(dataloader.dataset, IterableDataset):
        sizes = {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
        dataset = sharded_sampler.DataParallelIterable(
            dataloader.dataset, **sizes, rank=rank, world_size=world_size, stream=order
        )
        return ShardedDataLoader(
            dataset, share, **{**options, **sizes, "collate_fn": sharded_sampler.CollateShare(collate)}
        )
    if is_shared_out(dataloader):
        place = 0, 1
    sampler = sharded_sampler.DataParallelBatchSampler(dataloader.batch_sampler, *place, order)
    return ShardedDataLoader(dataloader.dataset, share, batch_sampler=sampler, **options)


def shard_dataloader_on_all_ranks(dataloader: DataLoader, mesh: HybridMesh, order: OrderStream) -> ShardedDataLoader:
    """Call `shard_dataloader` on all ranks of the mesh; raises its ConfigurationError, or if data differs."""
    place, group = (mesh.rank("dp"), mesh.size("dp")), control_group()
    sharded = raise_on_all_ranks(lambda: shard_dataloader(dataloader, *place, mesh.device, order), group)
    if sharded is not dataloader:
        sharded.given = dataloader
        check_same_data(dataloader, group)
    return sharded


class Loading:
    """Data loading of a plugin.

    Args:
        seed: seed of the sample order; None to use rank 0's default random states when it boosts a loader, which a
            plain loader would also draw from.
    """

    def __init__(self, mesh: HybridMesh, seed: int | None) -> None:
        self.mesh, self.seed = mesh, seed
        self.first_batches = ReplicaCheck(mesh)

    @cached_property
    def order(self) -> OrderStream:
        """Random stream of the sample order for loaders without a generator of the user, the same on all ranks."""
        return OrderStream() if self.seed is None else OrderStream.seeded(self.seed)

    def _follow_default(self) -> None:
        """Let the order continue from rank 0's default random states if the script has drawn from them."""
        if self.seed is None:
            state = None if self.order.is_current else LoadingStream().state_dict()
            state = broadcast_json(state and to_json(state, "the random state"), control_group())
            if state is not None:
                self.order.load_state_dict(from_json(state))

    def shard(self, dataloader: DataLoader) -> ShardedDataLoader:
        """Return a loader of this rank's share; all ranks call it; refuses one that cannot be sharded or differs."""
        # Imported here to defer the import of accelerate.
        from plugins.hybrid_parallel.data.dataloader import shard_dataloader_on_all_ranks

        self._follow_default()
        if not isinstance(dataloader.dataset, IterableDataset) and not len(dataloader):
            _log.warning(
                "the DataLoader has no batches: %d samples, batch_size=%s, drop_last=%s",
                len(dataloader.dataset),
                dataloader.batch_size,
                dataloader.drop_last,
            )
        sharded = shard_dataloader_on_all_ranks(dataloader, self.mesh, self.order)
        sharded.on_iteration = self.first_batches.count_iteration
        return sharded
