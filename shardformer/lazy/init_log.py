"""InitLog: a log of operations on tensors without values, replayed for one tensor at a time.

A tensor of the log is a `StorageView` of a *storage*. Views need no record, as they are other places in the same
storage. A `LoggedCall` is the effect of an operation on storages. The values of a place are computed by replaying the
steps that wrote its storage, and recursively the steps for the storages that these read. Steps before a complete
overwrite are skipped: a weight that its layer initializes first and its model initializes again is drawn once.

Random numbers depend on the seed, the name of the tensor that a step was run for, and the number of the draw, but not
on any order of execution. The idea of a log replayed per tensor is that of torchdistx' deferred_init.
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
class StorageView:
    """Position of a tensor in a storage without values: dtype, size, stride and offset."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> StorageView:
        """Return where the values of `tensor` lie."""
        return StorageView(
            tensor.untyped_storage(),
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            tensor.storage_offset(),
        )

    @property
    def is_whole(self) -> bool:
        """Return whether it covers all of its storage, contiguously."""
        expected = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self.offset == 0 and expected * self.dtype.itemsize == self.storage.nbytes()

    def in_storage(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a tensor at the same place in a storage with values."""
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, self.offset, self.size, self.stride)


@dataclass(eq=False)
class LoggedCall:
    """One logged operation.

    Attributes:
        number: position in the log.
        function: the operation; has a method `piece(spec)` if it can compute a part of its result (a file).
        args, kwargs: its arguments, with places instead of tensors.
        results: (index among the returned tensors, place) of the storages it creates.
        writes: the storages that it creates or changes.
        overwrites: the storage that it overwrites completely, without reading it.
        draws: whether it draws random numbers.
        owner: (name, ordinal) that its random numbers are drawn for.
    """

    number: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Sequence[tuple[int, StorageView]]
    writes: Sequence[torch.UntypedStorage]
    overwrites: torch.UntypedStorage | None = None
    draws: bool = False
    owner: tuple[str, int] | None = None
    reads: list[torch.UntypedStorage] = field(init=False)

    def __post_init__(self) -> None:
        places = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, StorageView)]
        self.reads = [place.storage for place in places if place.storage is not self.overwrites]

    def run(self, values: dict[torch.UntypedStorage, torch.UntypedStorage], seed: int) -> None:
        """Run the step on the storages with values."""

        def real(place: StorageView) -> Tensor:
            if place.storage not in values:  # its previous contents are not needed
                values[place.storage] = torch.UntypedStorage(place.storage.nbytes())
            return place.in_storage(values[place.storage])

        args, kwargs = tree_map_only(StorageView, real, (self.args, self.kwargs))
        if self.draws:
            torch.default_generator.manual_seed(_seed_of(seed, *(self.owner or ("", self.number))))
        returned = tree_leaves(self.function(*args, **kwargs))
        for position, place in self.results:
            values[place.storage] = _laid_out(returned[position], place)


class InitLog:
    """Log of the steps of one recording context; see the module docstring."""

    def __init__(self) -> None:
        self._writers: dict[torch.UntypedStorage, list[LoggedCall]] = {}
        self._count = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> InitLog:
        return self  # a copy of a model refers to the same log

    def knows(self, tensor: Tensor) -> bool:
        """Return whether the tensor is in a storage of the log."""
        return tensor.untyped_storage() in self._writers

    def add(self, function: Callable[..., Any], args: Any, kwargs: Any, **facts: Any) -> None:
        """Append a step; `facts` are the remaining fields of `LoggedCall`."""
        step = LoggedCall(self._count, function, args, kwargs, **facts)
        self._count += 1
        for storage in step.writes:
            self._writers.setdefault(storage, []).append(step)

    def own_draws(self, name: str, place: StorageView) -> None:
        """Assign to `name` the random draws that the values of `place` need and that have no owner yet."""
        for ordinal, step in enumerate(step for step in self._needed([place]) if step.draws):
            step.owner = step.owner or (name, ordinal)

    def is_read(self, place: StorageView) -> bool:
        """Return whether the values come from a file."""
        return any(hasattr(step.function, "piece") for step in self._needed([place]))

    def values(self, places: Sequence[StorageView], seed: int) -> list[Tensor]:
        """Compute the values of places; places that share a storage get tensors that share one."""
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

    def piece(self, place: StorageView, spec: ShardSpec, seed: int) -> Tensor:
        """Compute a piece of the values; from a file, only the piece is read."""
        step, casts = self._read_and_cast(place)
        if step is None:
            (values,) = self.values([place], seed)
            piece = values if spec.dim is None else spec.shard(values)
        else:
            piece = step.function.piece(spec)
        for dtype in reversed(casts):
            piece = piece.to(dtype)
        return piece

    def source(self, place: StorageView) -> Callable[..., Any] | None:
        """Return the reader of the values, if they are a file's tensor, cast at most to the place's dtype; or None."""
        step, casts = self._read_and_cast(place)
        return None if step is None or any(dtype != place.dtype for dtype in casts) else step.function

    def _read_and_cast(self, place: StorageView) -> tuple[LoggedCall | None, list[torch.dtype]]:
        """Return the step that reads the values, and the casts after it, last first; (None, []) if others follow."""
        casts: list[torch.dtype] = []
        step = self._last_writer(place, self._count)
        while step is not None and getattr(step.function, "piece", None) is None:
            if step.function is not torch.ops.aten._to_copy.default or not _same_shape(step.args[0], place):
                return None, []
            casts.append(place.dtype)
            place = step.args[0]
            step = self._last_writer(place, step.number)
        return step, casts

    def _last_writer(self, place: StorageView, before: int) -> LoggedCall | None:
        """Return the last step before `before` on this storage if it created all of the place's values; else None."""
        step = next((step for step in reversed(self._writers[place.storage]) if step.number < before), None)
        if step is None or not place.is_whole:
            return None
        makes = any(made.storage is place.storage and made.is_whole for _, made in step.results)
        return step if makes else None

    def _needed(self, places: Sequence[StorageView]) -> list[LoggedCall]:
        """Return the steps that the values of places need, in log order."""
        needed: dict[int, LoggedCall] = {}
        waiting = [(place.storage, self._count) for place in places]
        while waiting:
            storage, before = waiting.pop()
            for step in self._writing(storage, before):
                if step.number not in needed:
                    needed[step.number] = step
                    waiting += [(read, step.number) for read in step.reads]
        return [needed[number] for number in sorted(needed)]

    def _writing(self, storage: torch.UntypedStorage, before: int) -> Iterator[LoggedCall]:
        """Yield the steps that write `storage`, newest first, back to the one that overwrites all of it."""
        for step in reversed(self._writers.get(storage, ())):
            if step.number < before:
                yield step
                if step.overwrites is storage:
                    return


@contextmanager
def undisturbed(draws: bool = False) -> Iterator[None]:
    """Run outside of all active modes, without gradients, and restore the random state afterwards.

    Args:
        draws: whether random numbers are drawn; otherwise the state, which is large, is not copied.
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


def _same_shape(source: Any, place: StorageView) -> bool:
    return isinstance(source, StorageView) and source.size == place.size


def _laid_out(tensor: Tensor, place: StorageView) -> torch.UntypedStorage:
    """Return the storage of a tensor, laid out as the tensor without values was."""
    storage = tensor.untyped_storage()
    same = (tuple(tensor.stride()), tensor.storage_offset()) == (place.stride, place.offset)
    if same and storage.nbytes() >= place.storage.nbytes():
        return storage
    storage = torch.UntypedStorage(place.storage.nbytes())
    place.in_storage(storage).copy_(tensor)
    return storage
