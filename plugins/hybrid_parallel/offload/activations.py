"""OffloadedActivations: what layers save for the backward pass is elsewhere until the backward pass needs it.

When a layer starts, what the one before it has saved begins to leave memory; when the next one starts, it has left. So
what is saved last, and needed first, stays. In the backward pass the layer that comes next is brought back while one
runs: the one that came next in the step before, whatever the schedule of a pipeline.

The hooks are those of torch.autograd.graph.saved_tensors_hooks. Recomputed layers save their inputs alone.

What a GPU computes goes to page-locked memory, or through it to a file, on a stream of its own. Freed device memory is
used again on the stream of the computation, which waits for the copy; the host does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plugins.hybrid_parallel.config.groups import directory_of
from plugins.hybrid_parallel.offload.stores import Copy, FileCopy, FileStore, Store
from shardformer.utils.untraced import in_backward

if TYPE_CHECKING:
    from plugins.hybrid_parallel.step.passes import Pass


class KeptTensor:
    """A saved tensor that stays in memory.

    Attributes:
        tensor: shares memory and version with the saved one.
        version: of the values that the backward pass needs.
    """

    def __init__(self, tensor: Tensor) -> None:
        # Another object: autograd may still use the one that it gives, which `let_go` would empty.
        self.tensor, self.version = tensor.detach(), tensor._version

    def read(self) -> Tensor:
        """Return the tensor; RuntimeError if it changed in place: autograd leaves this check to who keeps it."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.shape)}] is at version {self.tensor._version}; expected version "
                f"{self.version} instead"
            )
        return self.tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the saved tensor."""
        return self.tensor.shape


class SavedTensor(KeptTensor):
    """A saved tensor whose storage may leave memory.

    Attributes:
        storage: the memory, which other saved tensors may share.
    """

    def __init__(self, tensor: Tensor, storage: SavedStorage, layer: SavedLayer) -> None:
        super().__init__(tensor)
        self.storage, self.layer = storage, layer
        self._shape, self._stride, self._offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        self._dtype = tensor.dtype
        layer.tensors.append(weakref.ref(self))
        storage.add(self)

    @property
    def shape(self) -> torch.Size:
        """The shape of the saved tensor."""
        return self._shape

    def read(self) -> Tensor:
        """Return the tensor, from memory or from its copy; raises RuntimeError if it has changed in place."""
        kept, data = super().read(), self.storage.read(self)
        if data is None:
            return kept
        # A view, so that a change in place of what one node reads is noticed by the others.
        whole = data[: len(data) // self._dtype.itemsize * self._dtype.itemsize].view(self._dtype)
        return whole.as_strided(self._shape, self._stride, self._offset)

    def let_go(self) -> None:
        """Give up the memory; what is left still tells whether the original changes."""
        self.tensor.data = self.tensor.new_empty(0)


class SavedLayer:
    """What was saved between the starts of two layers.

    Args:
        number: how many came before, since nothing was left of the steps before.

    Attributes:
        tensors: those that autograd still holds, and dead references.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.tensors: list[weakref.ref[SavedTensor]] = []

    @property
    def is_held(self) -> bool:
        """Whether autograd still holds any of them."""
        return any(reference() is not None for reference in self.tensors)

    @property
    def storages(self) -> Iterator[SavedStorage]:
        """The memory of what autograd still holds, the latest first, as a backward pass reads it."""
        for reference in reversed(self.tensors):
            if (tensor := reference()) is not None:
                yield tensor.storage

    def start(self) -> None:
        """Start to bring back what has left memory."""
        for storage in self.storages:
            storage.start()


class SavedStorage:
    """Memory that saved tensors share.

    Attributes:
        layer: the last one that has saved it.
        is_resident: whether the original is in memory.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.layer: SavedLayer | None = None
        self.is_resident = True
        self._source: torch.UntypedStorage | None = storage
        self._device = storage.device
        self._copy: Copy | None = None
        self._data: Tensor | None = None  # uint8 [bytes], brought back
        self._version = 0  # of it
        self._tensors: weakref.WeakSet[SavedTensor] = weakref.WeakSet()
        self._unread: weakref.WeakSet[SavedTensor] = weakref.WeakSet()  # in the present backward pass

    def __del__(self) -> None:
        if self.is_resident and self._copy is not None:
            self._copy.give_up()

    def add(self, tensor: SavedTensor) -> None:
        """Add a tensor of this memory, saved by the latest layer."""
        self.layer = tensor.layer
        self._tensors.add(tensor)
        self._unread.add(tensor)

    def copy_to(self, store: Store) -> None:
        """Start to copy it."""
        if self._copy is None:
            data = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._copy = store.put(data.set_(self._source))

    def leave(self) -> None:
        """Let go of the original once it is copied, if that was started: an error may have come before."""
        if self._copy is None or not self.is_resident:
            return
        self._copy.finish()
        self._source, self.is_resident = None, False
        for tensor in self._tensors:
            tensor.let_go()

    def start(self) -> None:
        """Start to bring it back."""
        if not self.is_resident and self._data is None:
            self._copy.start()

    def read(self, tensor: SavedTensor) -> Tensor | None:
        """Return the bytes for one of its tensors; None if the original is in memory.

        They are let go when all of its tensors have been read: if their graph is retained, another pass reads again.

        Raises:
            RuntimeError: a node of the graph has changed them in place.
        """
        if self.is_resident:
            return None
        if self._data is None:
            self._data = self._copy.take()
            self._version = self._data._version
        data = self._data
        if data._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation of "
                f"this backward pass: it has shape {list(tensor.shape)}"
            )
        self._unread.discard(tensor)
        if not self._unread:
            self._data, self._unread = None, weakref.WeakSet(self._tensors)
        return data


class PinnedStore:
    """Copies of GPU memory in page-locked memory, which torch's allocator of it keeps for later ones."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def put(self, data: Tensor) -> PinnedCopy:
        """Start to copy GPU memory."""
        return PinnedCopy(self, data)

    def to_host(self, data: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Start to copy GPU memory, uint8 [size]; return the copy, and the event after which it is complete."""
        host = page_locked(data.numel())
        self.stream.wait_stream(torch.cuda.current_stream(data.device))
        with torch.cuda.stream(self.stream):
            host.copy_(data, non_blocking=True)
            return host, self.stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        """Have the computation wait for an event."""
        torch.cuda.current_stream(self.stream.device).wait_event(event)

    def to_device(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Start to copy back; return the new GPU memory, and the event after which it is filled."""
        # Memory of the present stream, which may still be about to read what it held before.
        device = self.stream.device
        data = torch.empty(host.numel(), dtype=torch.uint8, device=device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            data.copy_(host, non_blocking=True)
            return data, self.stream.record_event()


class PinnedCopy:
    """A copy in page-locked memory."""

    def __init__(self, store: PinnedStore, data: Tensor) -> None:
        self._store = store
        self._host, self._complete = store.to_host(data)
        self._arriving: tuple[Tensor, torch.cuda.Event] | None = None

    def __del__(self) -> None:
        if self._arriving is not None:
            self._store.wait(self._arriving[1])  # the memory that it fills is about to be freed

    def finish(self) -> None:
        """Have the computation wait for the copy before it uses the memory again."""
        self._store.wait(self._complete)

    def give_up(self) -> None:
        """Do the same: a copy that was started cannot be stopped."""
        self._store.wait(self._complete)

    def start(self) -> None:
        """Start to copy back."""
        if self._arriving is None:
            self._arriving = self._store.to_device(self._host)

    def take(self) -> Tensor:
        """Return the bytes in new GPU memory, which the computation waits for."""
        self.start()
        (data, arrived), self._arriving = self._arriving, None
        self._store.wait(arrived)
        return data


class StagedStore:
    """Copies of GPU memory in a file."""

    def __init__(self, device: torch.device, file: FileStore) -> None:
        self.pinned, self.file = PinnedStore(device), file

    def put(self, data: Tensor) -> StagedCopy:
        """Start to copy GPU memory."""
        return StagedCopy(self, data)


class StagedCopy:
    """A copy in a file, which page-locked memory leads to and from."""

    def __init__(self, store: StagedStore, data: Tensor) -> None:
        self._store = store
        host, complete = store.pinned.to_host(data)
        self._on_host = complete

        def source() -> Tensor:
            complete.synchronize()
            return host

        self._copy = FileCopy(store.file, data.numel(), source, page_locked)

    def finish(self) -> None:
        """Wait until the bytes are written: page-locked memory for more than that would have no limit."""
        self._copy.finish()

    def give_up(self) -> None:
        """Write nothing, and have the computation wait before it uses the memory again."""
        self._store.pinned.wait(self._on_host)
        self._copy.give_up()

    def start(self) -> None:
        """Start to read the bytes."""
        self._copy.start()

    def take(self) -> Tensor:
        """Return the bytes in new GPU memory, which the computation waits for."""
        data, arrived = self._store.pinned.to_device(self._copy.take())
        self._store.pinned.wait(arrived)
        return data


def page_locked(size: int) -> Tensor:
    """Allocate page-locked memory, uint8 [size]."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


OPTION = "offload_activations"
_LEAST = 4096  # bytes: what is smaller stays


def activation_store(place: str | Path | None, device: torch.device) -> Store | None:
    """Return a rank's store by the option `place`; None if nothing moves; refuses a bad directory."""
    directory = directory_of(place)
    file = None if directory is None else FileStore(directory, OPTION)
    if place is None or device.type == "cpu":
        return file
    return PinnedStore(device) if file is None else StagedStore(device, file)


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

    def around_pass(self, this: Pass) -> AbstractContextManager[None]:
        """Move what forward passes save; generation saves nothing."""
        return nullcontext() if this.generates else self.running()

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
        """Start to copy out the previous layer's saved tensors; free those of the layer before it."""
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
