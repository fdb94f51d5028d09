"""The user's objects that decide the order of a loader's samples: what of their state a checkpoint can hold."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import IterableDataset

from booster.logging import get_logger
from plugins.hybrid_parallel.data.random_stream import state_of_generator
from plugins.hybrid_parallel.data.shares import DataParallelIterable

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
        num_workers, persistent_workers: options of the loader.
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
