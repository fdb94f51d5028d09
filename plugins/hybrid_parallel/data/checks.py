"""Checks of data across ranks: loaders before they are shared out, batches and losses in the first steps.

The ranks of a replica must get the same batch and compute the same loss; different replicas must get different batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, IterableDataset, Subset

from booster.data import PackingCollator
from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.data.media import is_media
from plugins.hybrid_parallel.data.microbatch import inner_values
from plugins.hybrid_parallel.data.random_stream import LoadingStream, generators_of
from plugins.hybrid_parallel.distributed.agreement import checksum, checksum_of
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from shardformer.distributed.process_groups import all_gather_json, world_group
from shardformer.layers.embedding import OutOfVocabularyError
from shardformer.utils.module_paths import text_config

_log = get_logger(__name__)

FIRST_STEPS = 2  # number of steps that are checked by default


def check_batch(batch: Mapping[str, Any], mesh: HybridMesh) -> None:
    """Compare the batch across all ranks: names and dtypes everywhere, values within each replica.

    Images and sounds may be in the batches of some replicas alone.

    Raises:
        ConfigurationError: the batches differ; raised on all ranks, and names the first difference.
    """
    if dist.get_world_size() == 1:
        return
    entries = {key: _entry(value) for key, value in batch.items()}
    kinds = [(key, entry[0]) for key, entry in sorted(entries.items()) if not is_media(key)]
    mine = torch.tensor([mesh.rank("dp"), checksum_of(kinds), checksum_of(sorted(entries.items()))])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine, group=world_group())
    replicas: dict[int, set[int]] = {}
    for replica, _, values in (row.tolist() for row in everyone):
        replicas.setdefault(replica, set()).add(values)
    same_kinds = len({int(row[1]) for row in everyone}) == 1
    if same_kinds and all(len(values) == 1 for values in replicas.values()):
        return
    found = all_gather_json([mesh.rank("dp"), mesh.place, entries])
    raise ConfigurationError(_first_difference(found))


def check_first_batch(units: int, least: int, mesh: HybridMesh) -> None:
    """Refuse, on all replicas, a first batch that cannot fill the pipeline; an epoch's last may be short."""
    fewest, replicas = torch.tensor(units), mesh.size("dp")  # on the CPU: the result is read at once
    if replicas > 1:
        dist.all_reduce(fewest, op=dist.ReduceOp.MIN, group=mesh.group("dp"))
    units = int(fewest)
    if not units and least:
        raise ConfigurationError(
            f"the first batch has fewer samples than the {replicas} replicas, which share it out; use batches of "
            f"{replicas} samples or more, or fewer replicas"
        )
    if units < least:
        raise ConfigurationError(
            f"the batch has {units} samples, fewer than num_microbatches={least}; "
            f"use batches of {least} or more, or num_microbatches={units}"
        )


# Families (`model_type`) in which the position of an image's tokens has its number in the batch, not in the sample.
_NUMBER_IMAGES = ("hunyuan_vl",)


def check_parts(model: nn.Module, batch: Mapping[str, Any], num_parts: int, group: ProcessGroup | None = None) -> None:
    """Refuse to cut the batch of a model whose positions or masks would change with the parts.

    Args:
        num_parts: micro-batches of this replica's share.
        group: the replicas, if there are several and all of them call this.
    """
    config = getattr(model, "config", None)
    are_compared = num_parts > 1 or group is not None
    if are_compared and _is_causal_if_padded(config) and batch.get("token_type_ids") is None:
        parts = _are_full(batch.get("attention_mask"), num_parts)
        everywhere = [parts] if group is None else all_gather_json(parts, group)
        if len({is_full for of_replica in everywhere for is_full in of_replica}) > 1:
            raise ConfigurationError(
                f"{type(model).__name__} attends to later tokens in a batch without padding alone, which some of "
                f"{sum(map(len, everywhere))} parts of this one would be; give token_type_ids, as its processor does, "
                "or use attn_implementation='eager'"
            )
    model_type = getattr(config, "model_type", None)
    if num_parts > 1 and model_type in _NUMBER_IMAGES and batch.get("image_grid_thw") is not None:
        raise ConfigurationError(
            f"{type(model).__name__} numbers the images of a whole batch in the positions of their tokens, which "
            f"{num_parts} micro-batches would each count from zero; use num_microbatches=1, or batches without images"
        )


def _are_full(mask: Any, num_parts: int) -> list[bool]:
    """Return for each part with samples whether its mask hides nothing; empty if there is no mask of tokens."""
    is_mask = isinstance(mask, Tensor) and mask.dim() == 2
    return [bool(part.all()) for part in mask.tensor_split(max(num_parts, 1)) if len(part)] if is_mask else []


def _is_causal_if_padded(config: Any) -> bool:
    """Return whether attention is causal by a mask alone, which transformers leaves out of a batch without padding."""
    text = text_config(config)
    is_bidirectional = getattr(text, "model_type", "") == "gemma" and getattr(text, "use_bidirectional_attention", None)
    return bool(is_bidirectional) and "sdpa" in str(text._attn_implementation)


def check_batch_of_replica(batch: Mapping[str, Any], mesh: HybridMesh) -> None:
    """Compare the batch across a replica's ranks, which call an ordinary loop's model; raises on all of them."""
    axes = [axis for axis in ("cp", "tp") if mesh.size(axis) > 1]
    entries = {key: _entry(value) for key, value in batch.items()} if axes else {}
    everywhere = [all_gather_json([mesh.rank("dp"), mesh.place, entries], mesh.group(axis)) for axis in axes]
    for found in everywhere:
        if any(other[2] != found[0][2] for other in found):
            raise ConfigurationError(_first_difference(found))


def check_loss(loss: Tensor, mesh: HybridMesh, what: str = "loss") -> None:
    """Compare a loss that the user computed, or its count, across a replica; ConfigurationError if it differs."""
    tolerance = 1e-5 if loss.dtype.itemsize > 2 else 1e-2
    for axis in (axis for axis in ("cp", "tp", "pp") if mesh.size(axis) > 1):
        found = all_gather_json([mesh.place, float(loss)], mesh.group(axis))
        place, value = found[0]
        for other_place, other in found[1:]:
            if abs(value - other) > tolerance * max(abs(value), abs(other)):
                raise ConfigurationError(
                    f"the {what} is {value:.6g} on {place} and {other:.6g} on {other_place}; compute it from the "
                    "model's outputs, which are the same on both: not from model.parameters(), of which each has its "
                    "own share (a penalty on weights is the optimizer's weight_decay), nor from random numbers that "
                    "the ranks draw from different seeds"
                )


def check_kind(kind: Enum, mesh: HybridMesh) -> None:
    """Compare what the replicas give for the loss, a mean or (sum, count); ConfigurationError if it differs."""
    found = all_gather_json([mesh.place, kind.value], mesh.group("dp")) if mesh.size("dp") > 1 else []
    for place, value in found:
        if value != found[0][1]:
            raise ConfigurationError(
                f"booster.backward got {found[0][1]} on {found[0][0]} and {value} on {place}; give the same form of "
                "the loss on all replicas, with a count of 0 where there is nothing to count"
            )


class ReplicaCheck:
    """Check, in the first steps, that replicas train on different samples.

    Attributes:
        iterations: number of times that boosted loaders of this rank were iterated.
    """

    def __init__(self, mesh: HybridMesh) -> None:
        self.mesh, self.iterations = mesh, 0
        self._steps_left = FIRST_STEPS if mesh.size("dp") > 1 else 0
        self._has_warned = False

    def count_iteration(self) -> None:
        """Count an iteration of a boosted loader."""
        self.iterations += 1

    def compare(self, batch: Mapping[str, Any]) -> None:
        """Compare the batches of all ranks; refuses unequal counts; warns of one batch on all replicas."""
        if not self._steps_left:
            return
        self._steps_left -= 1
        content = checksum_of(sorted((key, _entry(value)) for key, value in batch.items()))
        found = all_gather_json([self.mesh.place, self.iterations, content])
        for place, iterations, _ in found:
            if iterations != found[0][1]:
                first, count = found[0][:2]
                raise ConfigurationError(
                    f"{place} has iterated boosted dataloaders {iterations} times, {first} {count} times, so that the "
                    "order of the next samples would differ; iterate them equally often on all ranks, and look at "
                    "single batches of a plain DataLoader"
                )
        is_same = len({content for *_, content in found}) == 1 and not self.iterations
        if is_same and not self._has_warned and dist.get_rank() == 0:
            self._has_warned = True
            _log.warning(
                "all %d data-parallel replicas got the same batch, so that they train on one batch and not on %d; "
                "pass the dataloader to boost(), which shares it out",
                *[self.mesh.size("dp")] * 2,
            )


def _entry(value: Any) -> list[Any]:
    """Return the type or dtype, the shape and a checksum of a value; also of what mappings, tuples and lists hold."""
    if isinstance(value, Tensor):
        return [str(value.dtype).removeprefix("torch."), list(value.shape), checksum(value)]
    inner = inner_values(value)
    if not inner:
        return [type(value).__name__, [], checksum_of(value)]
    return [type(value).__name__, [len(inner)], checksum_of(sorted((key, _entry(each)) for key, each in inner.items()))]


def _first_difference(found: list[list[Any]]) -> str:
    """Describe the first two ranks whose batches do not match, in one sentence."""
    for other_replica, other_place, other in found[1:]:
        replica, place, entries = next(each for each in found if each[0] == other_replica)
        rule = "all ranks of a replica need the same batch: boost() the dataloader, or give it one seed on all of them"
        if entries == other:
            replica, place, entries = found[0]
        if replica != other_replica:
            rule = "all ranks need batches of the same inputs"
            entries, other = ({key: each[key] for key in each if not is_media(key)} for each in (entries, other))
        for key in [*entries, *(key for key in other if key not in entries)]:
            if key not in entries or key not in other:
                has, lacks = (place, other_place) if key in entries else (other_place, place)
                return f"the batch has '{key}' on {has} but not on {lacks}; {rule}"
            one, two = entries[key], other[key]
            if one[0] != two[0] or (replica == other_replica and one != two):
                what = [f"{kind} {shape}" for kind, shape, _ in (one, two)]
                how = f"{what[0]} and {what[1]}" if what[0] != what[1] else f"other values of {what[0]}"
                return f"'{key}' of the batch differs between {place} and {other_place} ({how}); {rule}"
    raise AssertionError("no difference")


@contextmanager
def naming_entry(batch: Mapping[str, Any]) -> Iterator[None]:
    """Add the batch entry and position to an OutOfVocabularyError raised by a pass over `batch`."""
    try:
        yield
    except OutOfVocabularyError as error:
        entry = _entry_with(error, batch)
        if error.entry or entry is None:
            raise
        raise OutOfVocabularyError(error.value, error.size, error.kind, entry) from None


def _entry_with(error: OutOfVocabularyError, batch: Mapping[str, Any]) -> str | None:
    """Return entry and position of the index: labels first for their error, else last (decoder inputs copy them)."""
    names = sorted(batch, key=lambda name: ("label" in name) != (error.kind == "label"))
    for name in names:
        value = batch[name]
        if isinstance(value, Tensor) and value.dim() and not value.is_floating_point():
            places = (value == error.value).nonzero()
            if len(places):
                return f"{name}{places[0].tolist()}"
    return None


_SHARES_OUT = "boost() shards the samples itself"
# Attribute names of (number of shards, index of this shard) in sharding samplers and datasets.
_NAMES = (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"))


def check_shareable(dataloader: DataLoader, rank: int, world_size: int) -> None:
    """Refuse a loader that cannot be sharded, or is by other than the data-parallel `rank` and `world_size`."""
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
    """Compare a loader's dataset, length and generators across ranks; raises ConfigurationError on all."""
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


def check_batch_size(dataloader: DataLoader, least: int) -> None:
    """Refuse a loader whose batches have fewer samples than a pipeline has micro-batches."""
    if isinstance(dataloader.collate_fn, PackingCollator):  # micro-batches are parts of a row
        return
    if dataloader.batch_size is not None and dataloader.batch_size < least:
        raise ConfigurationError(
            f"batch_size={dataloader.batch_size} has fewer samples than num_microbatches={least}; "
            f"use batch_size={least} or more, or num_microbatches={dataloader.batch_size}"
        )
