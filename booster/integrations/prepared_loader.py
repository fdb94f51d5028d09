"""A boosted loader as accelerate's loops expect one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import SeedableRandomSampler
from accelerate.state import GradientState
from torch.utils.data import DataLoader, RandomSampler


class PreparedLoader:
    """Loader of one replica's share of each global batch; it tells accelerate which batch is the last.

    Args:
        loader: the boosted loader.
        gradient_state: where accelerate keeps the loader under way.

    Attributes:
        end_of_dataloader: whether the batch at hand is the last of the epoch.
        remainder: samples of a short last global batch; 0 if it is full, -1 if that is unknown.
    """

    def __init__(self, loader: Any, gradient_state: GradientState) -> None:
        self.loader, self.gradient_state = loader, gradient_state
        self.end_of_dataloader, self.remainder = False, -1
        self.is_under_way = False
        self._to_skip = 0

    @property
    def total_batch_size(self) -> int:
        """Samples of a global batch."""
        return self.loader.global_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset."""
        return len(self.loader.dataset)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # After `set_epoch`, which starts an epoch from its beginning.
        if self._to_skip:
            self.loader.skip_batches, self._to_skip = self._to_skip, 0
        self.end_of_dataloader, self.is_under_way = False, True
        self.remainder = self._samples_of_short_batch()
        self.gradient_state._add_dataloader(self)
        try:
            yield from self._batches()
            self.is_under_way = False
        finally:
            self.gradient_state._remove_dataloader(self)

    def _samples_of_short_batch(self) -> int:
        try:
            samples = len(self.loader.dataset)
        except TypeError:
            return -1
        return -1 if self.loader.drop_last else samples % self.total_batch_size

    def _batches(self) -> Iterator[Any]:
        try:
            length = len(self.loader)
        except TypeError:
            yield from self._one_ahead()
            return
        for batch in self.loader:
            self.end_of_dataloader = self.loader.position in (0, length)
            yield batch

    def _one_ahead(self) -> Iterator[Any]:
        """Read a batch ahead of a dataset without length, to know the last one."""
        batches, end = iter(self.loader), object()
        batch = next(batches, end)
        while batch is not end:
            following = next(batches, end)
            self.end_of_dataloader = following is end
            yield batch
            batch = following

    def skip(self, num_batches: int) -> PreparedLoader:
        """Begin the next iteration after so many batches; return the loader itself."""
        self._to_skip = num_batches
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.loader.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def seedable(sampler: RandomSampler, seed: int | None) -> SeedableRandomSampler:
    """Return accelerate's sampler of the same samples, whose order depends on the seed and the epoch."""
    return SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=seed,
    )


def with_sampler(loader: DataLoader, sampler: Any) -> DataLoader:
    """Return the same loader with another sampler."""
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    names += ("generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order")
    options = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    return DataLoader(
        loader.dataset, batch_size=loader.batch_size, sampler=sampler, drop_last=loader.drop_last, **options
    )
