"""Checks before a loader is sharded: ranks have the same data in the same order, and the data is not sharded yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, IterableDataset, Subset

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.random_draws import generators_of
from plugins.hybrid_parallel.data.random_stream import LoadingStream
from plugins.hybrid_parallel.distributed.checksum import checksum, checksum_of
from shardformer.distributed.process_groups import all_gather_json

_SHARES_OUT = "boost() shards the samples itself"
# Attribute names of (number of shards, index of this shard) in sharding samplers and datasets.
_NAMES = (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"))


def check_shareable(dataloader: DataLoader, rank: int, world_size: int) -> None:
    """Refuse a loader that cannot be sharded, or is sharded differently from the layout.

    Args:
        dataloader: the user's loader.
        rank, world_size: position on the data-parallel axis.
    """
    kind = type(dataloader)
    if kind.__iter__ is not DataLoader.__iter__:
        raise ConfigurationError(
            f"the dataloader is a {kind.__module__.split('.')[0]} {kind.__name__}, which iterates in a way of its own "
            f"that boost() would lose; pass a torch DataLoader, {_SHARES_OUT}"
        )
    if isinstance(dataloader.dataset, IterableDataset):
        if dataloader.batch_size is None:
            raise ConfigurationError(
                "an iterable dataset needs a batch_size to be shared out; use batch_size=1 or more"
            )
    elif dataloader.batch_sampler is None:
        raise ConfigurationError("a DataLoader with batch_size=None cannot be sharded; use batch_size=1 or more")
    for part, (count, number) in _shares(dataloader, ("dataset",)):
        raise ConfigurationError(
            f"the dataset is share {number} of {count} already ({part}); {_SHARES_OUT}: give it the whole dataset"
        )
    for part, (count, number) in _shares(dataloader, ("batch_sampler", "sampler")):
        if (count, number) != (world_size, rank):
            raise ConfigurationError(
                f"the dataloader's {part} yields share {number} of {count}, but this is replica {rank} of "
                f"dp_size={world_size}; omit the sampler ({_SHARES_OUT}), or make it with "
                "num_replicas=plugin.dp_size and rank=plugin.dp_rank"
            )


def is_shared_out(dataloader: DataLoader) -> bool:
    """Return whether the user's sampler yields shards already, as `DistributedSampler` does."""
    return any(True for _ in _shares(dataloader, ("batch_sampler", "sampler")))


def _shares(owner: Any, attributes: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (class name, (number of shards, index of this shard)) of objects that shard, following `attributes`."""
    for attribute in attributes:
        part = getattr(owner, attribute, None)
        if part is None or isinstance(part, torch.Tensor | str):
            continue
        for holder in (part, getattr(part, "_distributed", None)):  # set by datasets.distributed.split_dataset_by_node
            share = next(filter(None, (_numbers(holder, *names) for names in _NAMES)), None)
            if share is not None and share[0] > 1:
                yield type(part).__name__, share
                return
        yield from _shares(part, attributes)


def _numbers(holder: Any, *names: str) -> tuple[int, int] | None:
    values = tuple(getattr(holder, name, None) for name in names)
    return values if all(isinstance(value, int) for value in values) else None


def check_same_data(dataloader: DataLoader, group: ProcessGroup) -> None:
    """Compare a loader across ranks: its dataset, its length, and the states of its generators.

    Args:
        dataloader: the user's loader.
        group: ranks to compare.

    Raises:
        ConfigurationError: the loaders differ; raised on all ranks.
    """
    found = all_gather_json(_description(dataloader), group)
    for rank, other in enumerate(found):
        what = next((key for key, value in other.items() if value != found[0][key]), None)
        if what is not None:
            raise ConfigurationError(
                f"{what} on rank {rank} than on rank 0; all ranks need the same dataset and seeds, {_SHARES_OUT}"
            )


def _description(dataloader: DataLoader) -> dict[str, Any]:
    """Return a dict from the sentence that reports a difference to the value to compare."""
    dataset, sampler = dataloader.dataset, dataloader.sampler
    generators = [each for each in (dataloader.generator, getattr(sampler, "generator", None)) if each is not None]
    indices = dataset.indices if isinstance(dataset, Subset) else ()
    return {
        "the dataset has another class": type(dataset).__name__,
        "the dataset has another length": _length(dataset),
        "the subset (random_split?) has other samples": checksum_of(list(indices)),
        "the dataloader has another length": _length(dataloader),
        "the dataset has other samples": _samples(dataloader),
        "the generator of the dataloader is in another state": [checksum(each.get_state()) for each in generators],
    }


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _samples(dataloader: DataLoader) -> list[int | None]:
    """Return checksums of the first and the last sample, None for a sample that cannot be compared.

    Skipped if worker processes load the data: what a dataset opens on access (HDF5) must not be open when they are
    forked.
    """
    dataset, length = dataloader.dataset, _length(dataloader.dataset)
    is_table = type(dataset).__module__.split(".")[0] == "datasets"
    if isinstance(dataset, IterableDataset) or not length or (dataloader.num_workers and not is_table):
        return []
    return [_checksum_of_sample(dataset, index) for index in (0, length - 1)]


def _checksum_of_sample(dataset: Any, index: int) -> int | None:
    """Return a sample's checksum, or None if the sample is random or cannot be accessed by index or described."""
    generators = [(generator, generator.get_state()) for generator in generators_of(dataset)]
    try:
        found = []
        for seed in (0, 1):
            with LoadingStream.seeded(seed).active():
                found.append(checksum_of(_content(dataset[index])))
    except Exception:
        return None
    finally:  # the check must not advance the dataset's generators
        for generator, state in generators:
            generator.set_state(state)
    return found[0] if found[0] == found[1] else None


def _content(sample: Any) -> Any:
    """Convert a sample to comparable plain values."""
    if isinstance(sample, Tensor):
        return [str(sample.dtype), list(sample.shape), checksum(sample)]
    if isinstance(sample, np.ndarray | np.generic):
        return [str(sample.dtype), sample.shape, sample.tobytes()]
    if isinstance(sample, Mapping):
        return [[key, _content(value)] for key, value in sample.items()]
    if isinstance(sample, list | tuple):
        return [_content(value) for value in sample]
    if sample is None or isinstance(sample, str | bytes | int | float):
        return sample
    raise TypeError(type(sample))
