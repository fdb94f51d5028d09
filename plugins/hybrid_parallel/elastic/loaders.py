"""Data loaders of a job whose number of replicas has changed: the same global batches, from the same position."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.dataloader import ShardedDataLoader
from plugins.hybrid_parallel.data.shares import DataParallelBatchSampler


def keep_global_batch(loader: Any, saved: dict[str, Any] | None) -> None:
    """Have a loader yield the global batches of a saved one, if its own differ.

    A script that gives each replica a constant number of samples has other global batches under another number of
    replicas.

    Raises:
        ConfigurationError: the replicas cannot share the global batch, or the loader's batches cannot be changed.
    """
    if saved is None or not isinstance(loader, ShardedDataLoader) or loader.batch_size is None:
        return
    size, replicas = saved["global_batch_size"], loader.global_batch_size // loader.batch_size
    if size == loader.global_batch_size:
        return
    if size % replicas:
        raise ConfigurationError(
            f"dp_size={replicas} does not divide the global batch of {size} samples, with which the job began; use a "
            "layout whose dp_size divides it"
        )
    sampler = loader.batch_sampler
    if not isinstance(sampler, DataParallelBatchSampler) or type(sampler.batch_sampler) is not BatchSampler:
        raise ConfigurationError(
            f"the job began with a global batch of {size} samples, and this loader has {loader.global_batch_size}; "
            f"make it with batch_size={size} // plugin.dp_size"
        )
    loader.batch_size, loader.global_batch_size = size // replicas, size
    sampler.batch_size = loader.batch_size
    sampler.batch_sampler = BatchSampler(sampler.sampler, loader.batch_size, sampler.drop_last)
