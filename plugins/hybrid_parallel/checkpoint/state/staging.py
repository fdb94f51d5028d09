"""Staging memory of asynchronous saves: a copy of the snapshot, so that training can change the original."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from plugins.hybrid_parallel.checkpoint.state.global_tensor import GlobalTensor, TensorChunk
from plugins.hybrid_parallel.checkpoint.state.training_state import Snapshot

_ALIGNMENT = 64  # bytes


class Staging:
    """Host memory that is reused between saves, because allocating it takes longer than filling it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Copy a snapshot into the staging memory, overwriting the previous one."""
        values = [part.values for tensor in snapshot.tensors.values() for part in tensor.rectangles]
        copies = iter(self._copies(values))
        tensors = {
            name: GlobalTensor(
                tensor.shape,
                tensor.dtype,
                [TensorChunk(part.offsets, part.sizes, next(copies)) for part in tensor.rectangles],
            )
            for name, tensor in snapshot.tensors.items()
        }
        return dataclasses.replace(snapshot, tensors=tensors)

    def _copies(self, values: Iterable[Tensor]) -> list[Tensor]:
        values = list(values)
        room = [-(-value.nbytes // _ALIGNMENT) * _ALIGNMENT for value in values]
        if sum(room) > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory first
            has_gpu = any(value.is_cuda for value in values)
            self._memory = torch.empty(sum(room), dtype=torch.uint8, pin_memory=has_gpu)
        position, copies = 0, []
        for value, size in zip(values, room, strict=True):
            target = self._memory[position : position + value.nbytes].view(value.dtype).view(value.shape)
            copies.append(target.copy_(value, non_blocking=True))
            position += size
        if any(value.is_cuda for value in values):
            torch.cuda.current_stream().synchronize()
        return copies
