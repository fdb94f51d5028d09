"""OffloadedActivations: what layers save for the backward pass is elsewhere until the backward pass needs it.

When a layer starts, what the one before it has saved begins to leave memory; when the next one starts, it has left. So
what is saved last, and needed first, stays. In the backward pass the layer that comes next is brought back while one
runs: the one that came next in the step before, whatever the schedule of a pipeline.

The hooks are those of torch.autograd.graph.saved_tensors_hooks. Recomputed layers save their inputs alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.offload import directory_of
from plugins.hybrid_parallel.offload.gpu_stores import PinnedStore, StagedStore
from plugins.hybrid_parallel.offload.saved_tensors import KeptTensor, SavedLayer, SavedStorage, SavedTensor
from plugins.hybrid_parallel.offload.stores import FileStore, Store
from shardformer.utils.backward_pass import in_backward

OPTION = "offload_activations"
_LEAST = 4096  # bytes: what is smaller stays


def activation_store(place: str | Path | None, device: torch.device) -> Store | None:
    """Return the store of a rank; None if activations stay where they are, as on a CPU with "cpu".

    Args:
        place: the option `offload_activations`.
        device: of the rank.

    Raises:
        ConfigurationError: if this rank cannot write to the directory.
    """
    directory = directory_of(place)
    file = None if directory is None else FileStore(directory, OPTION)
    if place is None or device.type == "cpu":
        return file
    return PinnedStore(device) if file is None else StagedStore(device, file)


def check_layers(place: str | Path | None, model: nn.Module) -> None:
    """Refuse a model without layers.

    Raises:
        ConfigurationError: if nothing in it tells what to keep and what to move.
    """
    if place is not None and not any(layers_of(model)):
        raise ConfigurationError(
            f"{OPTION}={str(place)!r} moves what layers save, and {type(model).__name__} has none (in a ModuleList); "
            f"use {OPTION}=None"
        )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model: those that transformers can recompute, or the modules of its lists."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = list(_outermost(model, lambda module, parent: isinstance(module, GradientCheckpointingLayer)))
    return found or list(_outermost(model, lambda module, parent: isinstance(parent, nn.ModuleList)))


def _outermost(parent: nn.Module, is_layer: Callable[[nn.Module, nn.Module], bool]) -> Iterator[nn.Module]:
    for child in parent.children():
        if is_layer(child, parent):
            yield child
        else:
            yield from _outermost(child, is_layer)


class OffloadedActivations:
    """Moves the activations of one model.

    Args:
        store: where they go.
        device: whose tensors are moved.
    """

    def __init__(self, store: Store, device: torch.device) -> None:
        self.store, self.device = store, device
        self._held: dict[Tensor, None] = {}  # parameters and buffers, whose memory stays anyway
        self._held_storages: set[int] = set()
        self._numbered: weakref.WeakValueDictionary[int, SavedLayer] = weakref.WeakValueDictionary()
        # (address and version of memory) -> that memory, while it is in memory
        self._known: weakref.WeakValueDictionary[tuple[int, int], SavedStorage] = weakref.WeakValueDictionary()
        self._current = self._leaving = SavedLayer(0)
        self._is_first = True  # whether a forward pass has yet to save something
        self._read: SavedLayer | None = None  # by the present backward pass
        self._next: dict[int, int] = {}  # layer -> the one whose tensors a backward pass has read after it

    def add(self, model: nn.Module) -> None:
        """Add a model, or one of its stages."""
        self._held |= dict.fromkeys((*model.parameters(), *model.buffers()))
        for layer in layers_of(model):
            layer.register_forward_pre_hook(self._before_layer, prepend=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedActivations:
        """Return one that moves nothing: the hooks of copies of a model call it."""
        return OffloadedActivations(self.store, self.device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Move in this context what forward passes save."""
        self.begin_pass()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def begin_pass(self) -> None:
        """Note that another micro-batch, or a backward pass, comes next."""
        self._is_first = True

    def _before_layer(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():  # where a layer is recomputed
            self._begin_layer()

    def _begin_layer(self) -> None:
        """Send off what the layer before has saved, and let go of what the one before that has."""
        self._is_first = False
        self._held_storages = {tensor.untyped_storage()._cdata for tensor in self._held}
        number = self._current.number + 1
        if not any(layer.is_held for layer in self._numbered.values()):  # a new step
            number, self._read = 0, None
        left, self._leaving, self._current = self._leaving, self._current, SavedLayer(number)
        self._numbered[number] = self._current
        for storage in left.storages:
            if storage.layer is left:
                storage.leave()
        self._known = weakref.WeakValueDictionary(
            {key: storage for key, storage in self._known.items() if storage.is_resident}
        )
        for storage in self._leaving.storages:
            if storage.layer is self._leaving:
                storage.copy_to(self.store)

    def _pack(self, tensor: Tensor) -> KeptTensor:
        if self._is_first and not in_backward():
            self._begin_layer()
        if not self._is_moved(tensor):
            return KeptTensor(tensor)
        key = tensor.untyped_storage()._cdata, tensor._version
        storage = self._known.get(key)
        if storage is None:
            storage = self._known[key] = SavedStorage(tensor.untyped_storage())
        return SavedTensor(tensor, storage, self._current)

    def _is_moved(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device != self.device:
            return False
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or in_backward():
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= _LEAST and storage._cdata not in self._held_storages

    def _unpack(self, saved: KeptTensor) -> Tensor:
        if isinstance(saved, SavedTensor) and saved.layer is not self._read:
            self._begin_to_read(saved.layer)
        return saved.read()

    def _begin_to_read(self, layer: SavedLayer) -> None:
        """Bring back what a backward pass needs after a layer."""
        ahead = self._numbered.get(self._next.get(layer.number, layer.number - 1))
        if self._read is not None:
            self._next[self._read.number] = layer.number
        self._read = layer
        layer.start()
        if ahead is not None:
            ahead.start()
