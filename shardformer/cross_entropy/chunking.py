"""Chunk sizes of the language-model head's loss, and the state by which a plan controls chunking."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Bytes of fp32 logits per chunk. Each chunk reads the weight and its gradient once, so the faster matrix products are
# relative to memory, the more rows a chunk needs. The CPU number is measured; the other follows from data sheets.
CPU_CHUNK_BYTES = 128 * 2**20
ACCELERATOR_CHUNK_BYTES = 512 * 2**20
FEWEST_ROWS = 128


class _State:
    """State of this process; global, as passes run one at a time."""

    planned_for: str | None = None
    decisions: dict[tuple[int, ...], bool] | None = None
    finds_gradients = False


def chunk_bytes(device: torch.device) -> int:
    """Return how many bytes the logits of one chunk may take on `device`, counted in fp32."""
    return CPU_CHUNK_BYTES if (_State.planned_for or device.type) == "cpu" else ACCELERATOR_CHUNK_BYTES


def chunk_rows(columns: int, device: torch.device) -> int:
    """Return the number of tokens in a chunk of logits with `columns` columns."""
    return max(FEWEST_ROWS, chunk_bytes(device) // max(4 * columns, 1) // FEWEST_ROWS * FEWEST_ROWS)


@contextmanager
def planned_for(device_type: str) -> Iterator[None]:
    """Run passes on fake tensors as if on a device of `device_type`.

    All heads of one shape follow the decision of the first, so that cost stays linear in the micro-batch size.
    """
    _State.planned_for, _State.decisions = device_type, {}
    try:
        yield
    finally:
        _State.planned_for = _State.decisions = None


def decided(shape: tuple[int, ...], decision: bool) -> bool:
    """Return the decision for a head whose weight has this shape; within a plan, the first decision for that shape."""
    return decision if _State.decisions is None else _State.decisions.setdefault(shape, decision)


@contextmanager
def finding_gradients() -> Iterator[None]:
    """Mark work that runs inside a forward pass but belongs to the backward pass."""
    _State.finds_gradients = True
    try:
        yield
    finally:
        _State.finds_gradients = False


def finds_gradients() -> bool:
    """Return whether a forward pass is inside `finding_gradients`."""
    return _State.finds_gradients
