"""Facts about a batch that the host knows before the batch moves to its device.

Sharding a sequence depends on two of them: whether the mask hides any token, and whether positions restart. Asking the
device in each pass would make the host wait for all kernels that are queued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardformer.attention.packed_documents import restart_flag


def record_facts(parts: Sequence[Mapping[str, Any]], on_host: Sequence[Mapping[str, Any]]) -> None:
    """Record the facts on the tensors of a batch's parts.

    Args:
        parts: the micro-batches.
        on_host: the same micro-batches, of the batch as it was given; if it was given on a device, the host waits for
            the device here, once for all parts.
    """
    for name, asks in _FACTS.items():
        known = [part.get(name) for part in on_host]
        if not known or not all(isinstance(each, Tensor) for each in known):
            continue
        answers = torch.stack([asks(each) for each in known]).tolist()
        for part, value, answer in zip(parts, known, answers, strict=True):
            if part[name] is not value:  # the user's own tensor may change
                part[name].known_fact = answer
    for part, given in zip(parts, on_host, strict=True):
        for name in _FACTS:
            there, known = part.get(name), given.get(name)
            if isinstance(known, Tensor) and known.device.type == "cpu" != there.device.type:
                there.on_host = known


def host_copy(x: Tensor) -> Tensor | None:
    """Return an attention mask, or positions, in the memory of the host; None if only the device has them."""
    return getattr(x, "on_host", None)


def hides_nothing(mask: Tensor) -> bool:
    """Return whether an attention mask is True, or not zero, everywhere."""
    return _answer(mask, _is_full)


def restarts(positions: Tensor) -> bool:
    """Return whether positions, [batch or 1, seq], restart within a row, at another document."""
    return _answer(positions, restart_flag)


def _answer(value: Tensor, asks: Callable[[Tensor], Tensor]) -> bool:
    known = getattr(value, "known_fact", None)
    return bool(asks(value)) if known is None else known


def _is_full(mask: Tensor) -> Tensor:
    return mask.bool().all()


_FACTS: Mapping[str, Callable[[Tensor], Tensor]] = {"attention_mask": _is_full, "position_ids": restart_flag}
