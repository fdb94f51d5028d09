"""InitLog: what was done to tensors without values, and doing of it what one tensor needs.

A tensor of the log is a place in a *storage* (`Place`): views need no record of their own, as they are other places in
the same storage. What an operation does to storages is a `Step`. The values of a place are found by doing over the
steps that wrote its storage, and those that they read from; a step whose result was overwritten as a whole is none of
them, so that a weight that its layer draws first and its model draws again is drawn once.

Random numbers depend on the seed, the name of the tensor that a step was done for, and the number of the draw, not on
the order of anything. The idea of a log that is replayed a tensor at a time is that of torchdistx' deferred_init.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from shardformer.shard_spec import ShardSpec


@dataclass(frozen=True, eq=False)
class Place:
    """Where a tensor lies in a storage without values."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> Place:
        return Place(
            tensor.untyped_storage(),
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            tensor.storage_offset(),
        )

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its storage, in the usual order."""
        expected = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self.offset == 0 and expected * self.dtype.itemsize == self.storage.nbytes()

    def in_storage(self, storage: torch.UntypedStorage) -> Tensor:
        """The same place in a storage with values."""
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, self.offset, self.size, self.stride)


@dataclass(eq=False)
class Step:
    """One operation.

    Attributes:
        number: its position in the log.
        function: what is done; with `piece(spec)` where it can do a part of it (a file).
        args, kwargs: places stand for tensors.
        results: (position among the returned tensors, place) of the storages it makes.
        writes: the storages that it makes or changes.
        overwrites: the storage that it gives new values as a whole, without reading it.
        draws: whether it takes random numbers.
        owner: what its random numbers are drawn for.
    """

    number: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Sequence[tuple[int, Place]]
    writes: Sequence[torch.UntypedStorage]
    overwrites: torch.UntypedStorage | None = None
    draws: bool = False
    owner: tuple[str, int] | None = None
    reads: list[torch.UntypedStorage] = field(init=False)

    def __post_init__(self) -> None:
        places = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Place)]
        self.reads = [place.storage for place in places if place.storage is not self.overwrites]

    def run(self, values: dict[torch.UntypedStorage, torch.UntypedStorage], seed: int) -> None:
        """Do it, in the storages with values."""

        def real(place: Place) -> Tensor:
            if place.storage not in values:  # nothing of what it held before is needed
                values[place.storage] = torch.UntypedStorage(place.storage.nbytes())
            return place.in_storage(values[place.storage])

        args, kwargs = tree_map_only(Place, real, (self.args, self.kwargs))
        if self.draws:
            torch.default_generator.manual_seed(_seed_of(seed, *(self.owner or ("", self.number))))
        returned = tree_leaves(self.function(*args, **kwargs))
        for position, place in self.results:
            values[place.storage] = _laid_out(returned[position], place)


class InitLog:
    """The steps of one context; see the module."""

    def __init__(self) -> None:
        self._writers: dict[torch.UntypedStorage, list[Step]] = {}
        self._count = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> InitLog:
        return self  # a copy of a model refers to the same log

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in a storage of the log."""
        return tensor.untyped_storage() in self._writers

    def add(self, function: Callable[..., Any], args: Any, kwargs: Any, **facts: Any) -> None:
        """Append a step; `facts` are the fields of `Step`."""
        step = Step(self._count, function, args, kwargs, **facts)
        self._count += 1
        for storage in step.writes:
            self._writers.setdefault(storage, []).append(step)

    def own_draws(self, name: str, place: Place) -> None:
        """Random numbers that the values of `place` need, and that no other name has claimed, are those of `name`."""
        for ordinal, step in enumerate(step for step in self._needed([place]) if step.draws):
            step.owner = step.owner or (name, ordinal)

    def is_read(self, place: Place) -> bool:
        """Whether the values come from a file."""
        return any(hasattr(step.function, "piece") for step in self._needed([place]))

    def values(self, places: Sequence[Place], seed: int) -> list[Tensor]:
        """The values of places, which share storages where the places do."""
        steps = self._needed(places)
        last = {storage: step.number for step in steps for storage in (*step.reads, *step.writes)}
        last |= {place.storage: self._count for place in places}
        values: dict[torch.UntypedStorage, torch.UntypedStorage] = {}
        with undisturbed(any(step.draws for step in steps)):
            for step in steps:
                step.run(values, seed)
                for storage in {*step.reads, *step.writes}:
                    if last[storage] <= step.number:
                        values.pop(storage, None)
            return [place.in_storage(values[place.storage]) for place in places]

    def piece(self, place: Place, spec: ShardSpec, seed: int) -> Tensor:
        """A piece of the values; of a file, no more than the piece is read."""
        step, casts = self._read_and_cast(place)
        if step is None:
            (values,) = self.values([place], seed)
            piece = values if spec.dim is None else spec.shard(values)
        else:
            piece = step.function.piece(spec)
        for dtype in reversed(casts):
            piece = piece.to(dtype)
        return piece

    def source(self, place: Place) -> Callable[..., Any] | None:
        """The tensor of a file that the values are, cast to the dtype of the place at most; None if they are none."""
        step, casts = self._read_and_cast(place)
        return None if step is None or any(dtype != place.dtype for dtype in casts) else step.function

    def _read_and_cast(self, place: Place) -> tuple[Step | None, list[torch.dtype]]:
        """The step that reads the values, if they are only cast behind it, and to what, the last first."""
        casts: list[torch.dtype] = []
        step = self._last_writer(place, self._count)
        while step is not None and getattr(step.function, "piece", None) is None:
            if step.function is not torch.ops.aten._to_copy.default or not _same_shape(step.args[0], place):
                return None, []
            casts.append(place.dtype)
            place = step.args[0]
            step = self._last_writer(place, step.number)
        return step, casts

    def _last_writer(self, place: Place, before: int) -> Step | None:
        """The step before `before` that gave all of the place its values, if there is one that did."""
        step = next((step for step in reversed(self._writers[place.storage]) if step.number < before), None)
        if step is None or not place.is_whole:
            return None
        makes = any(made.storage is place.storage and made.is_whole for _, made in step.results)
        return step if makes else None

    def _needed(self, places: Sequence[Place]) -> list[Step]:
        """The steps that the values of places need, in their order."""
        needed: dict[int, Step] = {}
        waiting = [(place.storage, self._count) for place in places]
        while waiting:
            storage, before = waiting.pop()
            for step in self._writing(storage, before):
                if step.number not in needed:
                    needed[step.number] = step
                    waiting += [(read, step.number) for read in step.reads]
        return [needed[number] for number in sorted(needed)]

    def _writing(self, storage: torch.UntypedStorage, before: int) -> Iterator[Step]:
        """Newest first, as far as the one that overwrites all of it."""
        for step in reversed(self._writers.get(storage, ())):
            if step.number < before:
                yield step
                if step.overwrites is storage:
                    return


@contextmanager
def undisturbed(draws: bool = False) -> Iterator[None]:
    """Neither seen by the modes that are active nor by whoever draws random numbers next.

    Args:
        draws: whether anything is drawn; the state of the generator is large.
    """
    state = torch.default_generator.get_state() if draws else None
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            yield
    finally:
        if state is not None:
            torch.default_generator.set_state(state)


def _seed_of(seed: int, name: str, ordinal: int) -> int:
    digest = hashlib.sha256(f"{seed}\0{name}\0{ordinal}".encode()).digest()
    return int.from_bytes(digest[:4], "little")  # torch's CPU generator takes 32 bits


def _same_shape(source: Any, place: Place) -> bool:
    return isinstance(source, Place) and source.size == place.size


def _laid_out(tensor: Tensor, place: Place) -> torch.UntypedStorage:
    """The storage of a tensor, laid out as the tensor without values was."""
    storage = tensor.untyped_storage()
    same = (tuple(tensor.stride()), tensor.storage_offset()) == (place.stride, place.offset)
    if same and storage.nbytes() >= place.storage.nbytes():
        return storage
    storage = torch.UntypedStorage(place.storage.nbytes())
    place.in_storage(storage).copy_(tensor)
    return storage
