"""Stores of what a GPU computes: page-locked memory of the machine, and a file that is reached through it.

Copies run on a stream of their own. Freed device memory is used again on the stream of the computation, which waits
for the copy; the host does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.hybrid_parallel.offload.stores import FileCopy, FileStore


class PinnedStore:
    """Copies of GPU memory in page-locked memory, which torch's allocator of it keeps for later ones.

    Args:
        device: the GPU.
    """

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
    """Copies of GPU memory in a file.

    Args:
        device: the GPU.
        file: the file.
    """

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
