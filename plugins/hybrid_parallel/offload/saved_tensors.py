"""What autograd holds for a saved tensor whose memory is elsewhere, and the memory that they share."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from plugins.hybrid_parallel.offload.stores import Copy, Store


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
        """Return the tensor.

        Raises:
            RuntimeError: it has changed in place; autograd leaves this check to whoever keeps saved tensors.
        """
        self.check()
        return self.tensor

    def check(self) -> None:
        """Refuse values that have changed since they were saved, as autograd does without hooks."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.shape)}] is at version {self.tensor._version}; expected version "
                f"{self.version} instead"
            )

    @property
    def shape(self) -> torch.Size:
        """The shape of the saved tensor."""
        return self.tensor.shape


class SavedTensor(KeptTensor):
    """A saved tensor whose storage may leave memory.

    Attributes:
        storage: the memory, which other saved tensors may share.
        layer: what was saved together with it.
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
        """Return the tensor, from memory or from its copy.

        Raises:
            RuntimeError: it has changed in place.
        """
        self.check()
        data = self.storage.read(self)
        if data is None:
            return self.tensor
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
