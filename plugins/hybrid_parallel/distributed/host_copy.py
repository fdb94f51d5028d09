"""Reading of tensors in small parts in host memory, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shardformer.utils.bytes import as_bytes

_PART = 16 * 2**20  # bytes of one copy from a GPU: a copy of 1 MiB takes mostly its launch


def host_chunks(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """Yield the bytes of a tensor on any device in host memory, `size` bytes at a time; the last chunk may be smaller.

    From a GPU the next part is copied to page-locked memory while the caller reads the present one.

    Args:
        tensor: the tensor, not changed in the meantime.
        size: bytes of a chunk. Each is valid until the next is asked for.
    """
    data = as_bytes(tensor.detach().reshape(-1))
    if data.is_cuda and data.numel() > size:
        yield from _copied_ahead(data, size, _page_locked, _start_copy)
    else:
        yield from (chunk.cpu() for chunk in data.split(size))


def _copied_ahead(
    data: Tensor,
    size: int,
    allocate: Callable[[int], Tensor],
    start_copy: Callable[[Tensor, Tensor], Callable[[], None]],
) -> Iterator[Tensor]:
    """Yield chunks of `data` from two buffers, of which one is filled while the other is read.

    Args:
        data: bytes on the device.
        size: bytes of a chunk.
        allocate: returns a buffer of so many bytes in host memory.
        start_copy: starts a copy (target, source), and returns a function that waits for it.
    """
    parts = data.split(max(_PART // size, 1) * size)
    buffers = [allocate(part.numel()) for part in parts[:2]]

    def begin(index: int) -> tuple[Tensor, Callable[[], None]]:
        target = buffers[index % 2][: parts[index].numel()]
        return target, start_copy(target, parts[index])

    present = begin(0)
    for following in range(1, len(parts) + 1):
        target, wait = present
        if following < len(parts):
            present = begin(following)
        wait()
        yield from target.split(size)


def _page_locked(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _start_copy(target: Tensor, source: Tensor) -> Callable[[], None]:
    target.copy_(source, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(source.device))
    return event.synchronize
