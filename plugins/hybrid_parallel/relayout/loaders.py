"""Data loaders under another layout: the same global batches, from the same position."""

from __future__ import annotations

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.dataloader import LOADER_OPTIONS, ShardedDataLoader


def check_loader(loader: DataLoader, dp_size: int) -> None:
    """Refuse a loader whose global batches `dp_size` replicas cannot share.

    Raises:
        ConfigurationError: if so, or if `boost` did not return the loader.
    """
    if not isinstance(loader, ShardedDataLoader):
        raise ConfigurationError(
            f"relayout() got a plain {type(loader).__name__}, which cannot say where it is in its epoch; give the "
            "loader that boost() returned"
        )
    if loader.global_batch_size % dp_size:
        raise ConfigurationError(
            f"dp_size={dp_size} does not divide the global batch of {loader.global_batch_size} samples, which "
            "relayout() keeps; use a layout whose dp_size divides it"
        )
    if loader.batch_size != _batch_size(loader, dp_size) and not _is_plain(loader.given):
        raise ConfigurationError(
            f"relayout() cannot change the batch_size={loader.batch_size} of a loader with a batch sampler of its own; "
            "keep dp_size, or boost a loader with batch_size"
        )


def loader_for(loader: ShardedDataLoader, dp_size: int) -> DataLoader:
    """Return the user's loader with a batch size by which `dp_size` replicas have the same global batches."""
    given, batch_size = loader.given, _batch_size(loader, dp_size)
    if batch_size == loader.batch_size:
        return given
    options = {name: getattr(given, name) for name in ("generator", *LOADER_OPTIONS) if hasattr(given, name)}
    if not isinstance(given.dataset, IterableDataset):
        options["sampler"] = given.sampler
    return DataLoader(given.dataset, batch_size=batch_size, drop_last=given.drop_last, **options)


def _batch_size(loader: ShardedDataLoader, dp_size: int) -> int | None:
    return None if loader.batch_size is None else loader.global_batch_size // dp_size


def _is_plain(given: DataLoader) -> bool:
    """Return whether torch made the batch sampler from `batch_size`."""
    return given.batch_size is not None and (
        isinstance(given.dataset, IterableDataset) or type(given.batch_sampler) is BatchSampler
    )
