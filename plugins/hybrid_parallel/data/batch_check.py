"""Checks of batches and losses across ranks in the first steps.

The ranks of a replica must get the same batch and compute the same loss; different replicas must get different batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.data.media import is_media
from plugins.hybrid_parallel.data.microbatch import inner_values
from plugins.hybrid_parallel.distributed.checksum import checksum, checksum_of
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from shardformer.distributed.process_groups import all_gather_json, world_group
from shardformer.layers.embedding import OutOfVocabularyError

_logger = get_logger(__name__)

FIRST_STEPS = 2  # number of steps that are checked by default


def check_batch(batch: Mapping[str, Any], mesh: HybridMesh) -> None:
    """Compare the batch across all ranks: names and dtypes everywhere, values within each replica.

    Images and sounds may be in the batches of some replicas alone.

    Args:
        batch: batch of this rank.

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


def check_batch_of_replica(batch: Mapping[str, Any], mesh: HybridMesh) -> None:
    """Compare the batch across tensor- and context-parallel ranks.

    This is the check for an ordinary loop, where only these ranks have to call the model together.

    Raises:
        ConfigurationError: the batches differ; raised on all of these ranks.
    """
    axes = [axis for axis in ("cp", "tp") if mesh.size(axis) > 1]
    entries = {key: _entry(value) for key, value in batch.items()} if axes else {}
    everywhere = [all_gather_json([mesh.rank("dp"), mesh.place, entries], mesh.group(axis)) for axis in axes]
    for found in everywhere:
        if any(other[2] != found[0][2] for other in found):
            raise ConfigurationError(_first_difference(found))


def check_loss(loss: Tensor, mesh: HybridMesh, what: str = "loss") -> None:
    """Compare a loss that the user computed, or its count, across the ranks of a replica.

    Raises:
        ConfigurationError: the loss differs; raised on all of these ranks.
    """
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
    """Compare what the scripts of all replicas give for the loss: a mean, or (sum, count).

    Raises:
        ConfigurationError: it differs; raised on all of these ranks.
    """
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
        """Compare the batches of all ranks; warn if all replicas got the same batch from a loader that is not boosted.

        Raises:
            ConfigurationError: ranks iterated boosted loaders a different number of times; raised on all ranks.
        """
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
            _logger.warning(
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
    """Add the batch entry and position to an out-of-vocabulary error raised by a pass over `batch`.

    Raises:
        OutOfVocabularyError: the original error, with its position in the batch.
    """
    try:
        yield
    except OutOfVocabularyError as error:
        entry = _entry_with(error, batch)
        if error.entry or entry is None:
            raise
        raise OutOfVocabularyError(error.value, error.size, error.kind, entry) from None


def _entry_with(error: OutOfVocabularyError, batch: Mapping[str, Any]) -> str | None:
    """Return the entry and position that hold the index.

    Labels are searched first for a label error and last otherwise, because decoder inputs may be made of labels.
    """
    names = sorted(batch, key=lambda name: ("label" in name) != (error.kind == "label"))
    for name in names:
        value = batch[name]
        if isinstance(value, Tensor) and value.dim() and not value.is_floating_point():
            places = (value == error.value).nonzero()
            if len(places):
                return f"{name}{places[0].tolist()}"
    return None
