"""Replay of recorded values: maps the tensors of a model built in `record_module_init` to places in the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardformer.lazy.init_log import InitLog, StorageView
from shardformer.shard_spec import ShardSpec

_ATTRIBUTE = "_recorded_tensors"
_NOT_ATTRIBUTES = ("_parameters", "_buffers", "_modules", "_init_args", "_init_kwargs")


@dataclass(frozen=True)
class RecordedTensors:
    """The tensors of one module at the end of the recording context.

    Attributes:
        log: log that holds the places.
        places: name of a parameter or buffer -> its place and its version, the number of in-place changes.
        attributes: name of another attribute that is or holds tensors -> the attribute with places instead of tensors.
    """

    log: InitLog
    places: Mapping[str, tuple[StorageView, int]]
    attributes: Mapping[str, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordedTensors:
        return self

    def place_of(self, name: str, tensor: Tensor) -> StorageView | None:
        """Return the place of a module's tensor in the log; None if it is unknown.

        Raises:
            ValueError: the tensor was changed after the end of the recording context.
        """
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
    """Values of a model that was built in `record_module_init`, as a WeightReader.

    Create it while the model is whole: random draws belong to the first name of a parameter in the whole model.

    Args:
        model: the model, not yet sharded.
        seed: seed of the random numbers.
    """

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
        """Return the piece of a parameter or buffer that `spec` defines.

        Raises:
            ValueError: the name is unknown.
        """
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
