"""Cutting a batch into micro-batches, and putting their outputs together again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from booster.errors import ConfigurationError

# The inputs that say how many samples a batch has; without any of them the first tensor does.
_MAIN_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "labels")


def as_batch(value: Any) -> dict[str, Any]:
    """A batch as keyword arguments of the model.

    Raises:
        ConfigurationError: it is not a mapping.
    """
    if isinstance(value, Mapping):
        return dict(value)
    raise ConfigurationError(
        f"a batch is a {type(value).__name__}; use a mapping of the model's keyword arguments to tensors"
    )


def num_rows(batch: Mapping[str, Any]) -> int:
    """How many samples a batch has."""
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor) and value.dim() > 0}
    if not tensors:
        raise ConfigurationError(f"the batch has no tensor among {sorted(batch)}; give at least the model's main input")
    main = next((key for key in _MAIN_INPUTS if key in tensors), next(iter(tensors)))
    return tensors[main].shape[0]


def split_batch(batch: Mapping[str, Any], num_microbatches: int) -> list[dict[str, Any]]:
    """Cut the samples into parts that differ by one at most; what has no sample dim goes to every part."""
    if num_microbatches == 0:
        return []
    rows = num_rows(batch)
    parts: list[dict[str, Any]] = [{} for _ in range(num_microbatches)]
    for key, value in batch.items():
        per_sample = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows
        pieces = value.tensor_split(num_microbatches) if per_sample else [value] * num_microbatches
        for part, piece in zip(parts, pieces, strict=True):
            part[key] = piece
    return parts


def stand_in(batch: Mapping[str, Any]) -> dict[str, Any]:
    """One sample that an empty share stands for: zeros, and masks that hide nothing."""
    rows = num_rows(batch)

    def sample(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != rows:
            return value
        return value.new_full((1, *value.shape[1:]), int("mask" in name))

    return {name: sample(name, value) for name, value in batch.items()}


def nothing_of(outputs: Any) -> Tensor:
    """Zero (0-d) that depends on all outputs, so that a backward pass from it goes through the whole model."""
    values = outputs.values() if isinstance(outputs, Mapping) else [outputs]
    return sum(value.sum() * 0.0 for value in values if isinstance(value, Tensor) and value.is_floating_point())


def signature(batch: Mapping[str, Any]) -> tuple:
    """What the shapes of a stage's activations depend on; neighbouring stages see the same."""
    return tuple((key, tuple(value.shape) if isinstance(value, Tensor) else None) for key, value in batch.items())


def to_device(
    batch: Mapping[str, Any], device: torch.device, dtype: torch.dtype | None, uncast: Collection[str] = ()
) -> dict[str, Any]:
    """Move tensors to `device`; floating-point ones become `dtype` where it is given, but for those named `uncast`."""

    def move(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        casts = value.is_floating_point() and key not in uncast
        return value.to(device, dtype if casts else None, non_blocking=True)

    return {key: move(key, value) for key, value in batch.items()}


def merge_outputs(outputs: Sequence[Any]) -> Any:
    """Concatenate the outputs of micro-batches along the samples; what is not a tensor is left out."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.dim() else torch.stack(list(outputs))
    merged = {
        key: torch.cat([output[key] for output in outputs])
        for key, value in first.items()
        if isinstance(value, Tensor) and value.dim() > 0
    }
    return type(first)(**merged)
