"""How large the chunks are in which the loss of a language-model head is computed, and what a plan asks of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Of logits in fp32. Every chunk reads the weight and its gradient once, so that it needs the more rows the faster
# products are beside memory. The number for CPUs is measured; the other is worked out from data sheets.
CPU_CHUNK_BYTES = 128 * 2**20
ACCELERATOR_CHUNK_BYTES = 512 * 2**20
FEWEST_ROWS = 128


class _State:
    """Of this process, as passes run one at a time."""

    planned_for: str | None = None
    decisions: dict[tuple[int, ...], bool] | None = None
    finds_gradients = False


def chunk_bytes(device: torch.device) -> int:
    """How much memory the logits of one chunk may take on `device`, counted in fp32."""
    return CPU_CHUNK_BYTES if (_State.planned_for or device.type) == "cpu" else ACCELERATOR_CHUNK_BYTES


def chunk_rows(columns: int, device: torch.device) -> int:
    """How many tokens are in a chunk of logits with so many columns."""
    return max(FEWEST_ROWS, chunk_bytes(device) // max(4 * columns, 1) // FEWEST_ROWS * FEWEST_ROWS)


@contextmanager
def planned_for(device_type: str) -> Iterator[None]:
    """Passes on fake tensors, as on a device of `device_type`. Heads of one shape do all the same as the first of them:
    the costs of micro-batches of several sizes are to lie on one line."""
    _State.planned_for, _State.decisions = device_type, {}
    try:
        yield
    finally:
        _State.planned_for = _State.decisions = None


def decided(shape: tuple[int, ...], decision: bool) -> bool:
    """What a head whose weight has this shape does; outside of a plan, what it has decided."""
    return decision if _State.decisions is None else _State.decisions.setdefault(shape, decision)


@contextmanager
def finding_gradients() -> Iterator[None]:
    """What runs inside of a forward pass belongs to the backward pass by its nature."""
    _State.finds_gradients = True
    try:
        yield
    finally:
        _State.finds_gradients = False


def finds_gradients() -> bool:
    """Whether a forward pass is at `finding_gradients`."""
    return _State.finds_gradients
