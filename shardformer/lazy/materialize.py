"""Values for a model that was built, and sharded, on the meta device: replayed from a log, or read; empty copies.

`InitLog` logs operations on tensors without values. A tensor of the log is a `StorageView` of a *storage*. Views need
no record, as they are other places in the same storage. A `LoggedCall` is the effect of an operation on storages. The
values of a place are computed by replaying the steps that wrote its storage, and recursively the steps for the storages
that these read. Steps before a complete overwrite are skipped: a weight that its layer initializes first and its model
initializes again is drawn once.

Random numbers depend on the seed, the name of the tensor that a step was run for, and the number of the draw, but not
on any order of execution. The idea of a log replayed per tensor is that of torchdistx' deferred_init.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from shardformer.layers.parallel_module import sum_partial_gradients
from shardformer.shard_spec import ShardSpec, annotate, grad_group_of, parameter_like, spec_of
from shardformer.utils.freed_memory import FreedMemory


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
    """One logged operation."""

    number: int  # position in the log
    # the operation; has a method `piece(spec)` if it can compute a part of its result (a file)
    function: Callable[..., Any]
    # args, kwargs: its arguments, with places instead of tensors
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Sequence[tuple[int, StorageView]]  # (index among the returned tensors, place) of the storages it creates
    writes: Sequence[torch.UntypedStorage]  # the storages that it creates or changes
    overwrites: torch.UntypedStorage | None = None  # the storage that it overwrites completely, without reading it
    draws: bool = False  # whether it draws random numbers
    owner: tuple[str, int] | None = None  # (name, ordinal) that its random numbers are drawn for
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
    """Run outside of modes, without gradients; `draws`: restore the random state, which is large."""
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


_ATTRIBUTE = "_recorded_tensors"
_NOT_ATTRIBUTES = ("_parameters", "_buffers", "_modules", "_init_args", "_init_kwargs")


@dataclass(frozen=True)
class RecordedTensors:
    """The tensors of one module at the end of the recording context."""

    log: InitLog  # log that holds the places
    # name of a parameter or buffer -> its place and its version, the number of in-place changes
    places: Mapping[str, tuple[StorageView, int]]
    # name of another attribute that is or holds tensors -> the attribute with places instead of tensors
    attributes: Mapping[str, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordedTensors:
        return self

    def place_of(self, name: str, tensor: Tensor) -> StorageView | None:
        """Return a module tensor's place in the log, or None; ValueError if changed after the context's end."""
        recorded, version = self.places.get(name, (None, 0))
        if self.log.knows(tensor):
            if recorded is not None and recorded.storage is tensor.untyped_storage() and tensor._version != version:
                raise ValueError(
                    f"{name} was changed while it had no values; change it inside of record_module_init(), or after "
                    "it was given values"
                )
            return StorageView.of(tensor)
        # The tensor was converted, for example by `model.half()`.
        return recorded if recorded is not None and recorded.size == tuple(tensor.shape) else None


def remember(module: nn.Module, log: InitLog) -> None:
    """Store the places of a module's own tensors in the module."""
    places = {
        name: (StorageView.of(tensor), tensor._version) for name, tensor in _own_tensors(module) if log.knows(tensor)
    }
    attributes = {
        name: tree_map_only(Tensor, lambda each: StorageView.of(each) if log.knows(each) else each, value)
        for name, value in vars(module).items()
        if name not in _NOT_ATTRIBUTES and any(map(log.knows, _plain_tensors(value)))
    }
    if places or attributes:
        module.__dict__[_ATTRIBUTE] = RecordedTensors(log, places, attributes)


def is_recorded(model: nn.Module) -> bool:
    """Return whether any part of the model was built in `record_module_init` and has no values yet."""
    return any(_ATTRIBUTE in vars(module) for module in model.modules())


class RecordedValues:
    """Values of a recorded model, as a WeightReader, made while it is whole: first names draw."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._places: dict[str, tuple[InitLog, StorageView]] = {}
        for name, (log, place) in _places_of(model):
            log.own_draws(name, place)
            self._places[name] = (log, place)

    def knows(self, name: str) -> bool:
        """Return whether a parameter or buffer was made in the recording context."""
        return name in self._places

    def is_read(self, name: str) -> bool:
        """Return whether the values of a parameter or buffer come from a file."""
        return self.knows(name) and self._places[name][0].is_read(self._places[name][1])

    def source(self, name: str) -> Any:
        """Return the `FileTensor` or `BinTensor` that holds the values; None if the values are computed."""
        log, place = self._places[name]
        return log.source(place)

    def __call__(self, name: str, spec: ShardSpec) -> Tensor:
        """Return the piece of a parameter or buffer that `spec` defines; raises ValueError if the name is unknown."""
        if not self.knows(name):
            raise ValueError(
                f"{name} is on the meta device, and was not made in record_module_init(); make it inside of it, or "
                "on a device"
            )
        log, place = self._places[name]
        return log.piece(place, spec, self._seed)

    def fill_buffers(self, model: nn.Module) -> None:
        """Give values to buffers, and to tensors that are plain attributes of modules."""
        for prefix, module in model.named_modules():
            recorded = vars(module).pop(_ATTRIBUTE, None)
            if recorded is None:
                continue
            for name, buffer in list(module.named_buffers(recurse=False)):
                place = recorded.place_of(name, buffer) if buffer.is_meta else None
                if place is not None:
                    values = self._values(recorded.log, f"{prefix}.{name}", place).to(buffer.dtype)
                    module._buffers[name] = values
            for name, places in recorded.attributes.items():
                if any(each.is_meta for each in _plain_tensors(vars(module).get(name))):
                    fill = partial(self._values, recorded.log, f"{prefix}.{name}")
                    module.__dict__[name] = tree_map_only(StorageView, fill, places)

    def _values(self, log: InitLog, name: str, place: StorageView) -> Tensor:
        log.own_draws(name, place)
        return log.values([place], self._seed)[0]


def _places_of(model: nn.Module) -> Iterator[tuple[str, tuple[InitLog, StorageView]]]:
    """Yield every name of a parameter or buffer on the meta device with its log and place, first names first."""
    known: dict[int, tuple[InitLog, StorageView]] = {}
    for module in model.modules():
        recorded = vars(module).get(_ATTRIBUTE)
        for name, tensor in _own_tensors(module):
            if tensor.is_meta and recorded is not None and id(tensor) not in known:
                place = recorded.place_of(name, tensor)
                if place is not None:
                    known[id(tensor)] = (recorded.log, place)
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *model.named_buffers(remove_duplicate=False)):
        if id(tensor) in known:
            yield name, known[id(tensor)]


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _plain_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in an attribute that are not parameters (parameters are filled where they are registered)."""
    if not isinstance(value, Tensor | list | tuple | dict):
        return []
    return [
        leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter)
    ]


# (parameter name, spec of the piece on this rank) -> the values of that piece.
WeightReader = Callable[[str, ShardSpec], Tensor]


def set_weight_reader(model: nn.Module, reader: WeightReader) -> None:
    """Set the source of the values of a model on the meta device, for use after sharding."""
    model.weight_reader = reader


def weight_reader_of(model: nn.Module) -> WeightReader | None:
    """Return the reader that `set_weight_reader` set; None if there is none."""
    return getattr(model, "weight_reader", None)


def waits_for_values(model: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers on the meta device."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in named if tensor.is_meta]


def materialize(model: nn.Module, reader: WeightReader | None = None, seed: int | None = None) -> None:
    """Give values to every parameter on the meta device; the reader sees each once, under its first name.

    Args:
        model: as built in `record_module_init`, for a whole model in plain torch; or, with a reader, after
            `ShardFormer.optimize`, when each parameter has the shape of this rank's piece.
        reader: asked for one piece at a time, so that at most one whole tensor is in memory in addition to the
            pieces. None for the values that the model was recorded with.
        seed: seed of the random numbers of a recorded model; None for torch's current seed.

    Raises:
        ValueError: the reader returned a piece of another shape, the values of a parameter are unknown, or a buffer is
            on the meta device.
    """
    if reader is None:
        reader = RecordedValues(model, torch.initial_seed() % 2**31 if seed is None else seed)
        reader.fill_buffers(model)
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if buffers:
        raise ValueError(
            f"buffer {buffers[0]} is on the meta device, where it lost its values; build the model in "
            "record_module_init()"
        )
    waiting = [(name, parameter) for name, parameter in model.named_parameters() if parameter.is_meta]
    freed = FreedMemory(sum(parameter.nbytes for _, parameter in waiting))
    # Largest first: a large whole tensor then coexists with few pieces.
    for name, parameter in sorted(waiting, key=lambda each: -math.prod(spec_of(each[1]).full_shape)):
        # In place: other objects (tied names, the pipeline's list of shared parameters) refer to the same parameter.
        values, grad_group = read_values(reader, name, parameter), grad_group_of(parameter)
        made = annotate(parameter_like(parameter, values.to(parameter.dtype)), spec_of(parameter), grad_group)
        torch.utils.swap_tensors(parameter, made)
        del values, made
        freed.add(math.prod(spec_of(parameter).full_shape) * parameter.element_size())
    sum_partial_gradients(model)


def read_values(reader: WeightReader, name: str, parameter: nn.Parameter) -> Tensor:
    """Return a parameter's values from a reader; ValueError if it does not know them, or in this shape."""
    spec = spec_of(parameter)
    with torch.no_grad():
        values = reader(name, spec)
    if values.shape != parameter.shape:
        raise ValueError(
            f"the piece of {name} that was read has shape {tuple(values.shape)}; this rank holds "
            f"{tuple(parameter.shape)} of {spec.full_shape}"
        )
    return values


_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def empty_copy(model: nn.Module) -> nn.Module:
    """Copy the modules of a model; parameters are on the meta device, buffers and hooks are those of the original.

    The copy does not know where the model reads its values. Buffers of the model have values already.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = _empty(parameter)
        hooks = [held for name in _HOOKS if (held := vars(module).get(name)) is not None]
        # Hooks may be methods of any object, which a deep copy would include.
        kept = chain(module._buffers.values(), *(held.values() for held in hooks))
        memo |= {id(each): each for each in kept if each is not None}
        # A deep copy of an ordered dictionary, even of an empty one, takes longer than all the rest of a module.
        memo |= {id(held): held.copy() for held in hooks}
    reader = vars(model).get("weight_reader")
    if reader is not None:
        memo[id(reader)] = None
    found = copy.deepcopy(model, memo)
    found.__dict__.pop("weight_reader", None)
    return found


def _empty(parameter: nn.Parameter) -> nn.Parameter:
    found = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    found.__dict__.update(parameter.__dict__)
    return found
