"""Splitting of a batch into micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.media import parts_of_media, without_media
from shardformer.distributed.blocked_collectives import joined_blocks

# Inputs that determine the number of samples of a batch; if none is present, the first tensor does.
_MAIN_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "labels")

# Entries that may have several rows for each sample, those of one sample in a row: the codebooks of Dia's labels, the
# documents of RAG's contexts.
_SEVERAL_ROWS = ("labels", "context_input_ids", "context_attention_mask")


def next_batch(batches: Any) -> Any:
    """Return the next batch of an iterator; a mapping is itself a batch.

    Raises:
        ConfigurationError: the value is neither.
    """
    if isinstance(batches, Mapping):
        return batches
    if isinstance(batches, Iterator):
        return next(batches)
    kind = type(batches).__name__
    raise ConfigurationError(
        f"execute_pipeline takes a batch from an iterator, and was given a {kind}; "
        "give it iter(dataloader), made once an epoch, or the batch itself, a mapping"
    )


def as_batch(value: Any) -> dict[str, Any]:
    """Return a batch as keyword arguments of the model.

    Raises:
        ConfigurationError: the value is not a mapping.
    """
    if isinstance(value, Mapping):
        return dict(value)
    raise ConfigurationError(
        f"a batch is a {type(value).__name__}; use a mapping of the model's keyword arguments to tensors"
    )


def num_rows(batch: Mapping[str, Any]) -> int:
    """Return the number of samples in a batch.

    Raises:
        ConfigurationError: the batch has no tensor.
    """
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor) and value.dim() > 0}
    if not tensors:
        raise ConfigurationError(f"the batch has no tensor among {sorted(batch)}; give at least the model's main input")
    main = next((key for key in _MAIN_INPUTS if key in tensors), next(iter(tensors)))
    return tensors[main].shape[0]


def split_batch(
    batch: Mapping[str, Any],
    num_microbatches: int,
    cuts: Sequence[int] | None = None,
    tokens: Mapping[str, int] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Split the samples into parts whose sizes differ by at most one; entries without a sample dim go to every part.

    Args:
        num_microbatches: number of parts.
        cuts: [parts + 1] token indices at which a batch of one row is cut instead.
        tokens: of images and sounds, see `media_tokens`.

    Raises:
        ConfigurationError: the batch lists images or sounds, and not to which samples they belong.
    """
    if num_microbatches == 0:
        return []
    if cuts is not None:
        return [
            {name: _tokens(value, *pair, cuts[-1]) for name, value in batch.items()}
            for pair in itertools.pairwise(cuts)
        ]
    rows = num_rows(batch)
    parts: list[dict[str, Any]] = [{} for _ in range(num_microbatches)]
    media = parts_of_media(batch, rows, num_microbatches, tokens) if num_microbatches > 1 else {}
    for key, value in batch.items():
        pieces = _labels_of_masked(batch, num_microbatches) if key == "labels" else media.get(key)
        for part, piece in zip(parts, pieces or _pieces(key, value, rows, num_microbatches), strict=True):
            if piece is not None or key not in media:
                part[key] = piece
    return parts


def has_tokens(value: Any, length: int) -> bool:
    """Return whether an entry of a batch of one row has a value for each of its `length` tokens, [1, length, ...]."""
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[0] == 1 and value.shape[1] == length


def _tokens(value: Any, start: int, end: int, length: int) -> Any:
    return value[:, start:end] if has_tokens(value, length) else value


def _pieces(key: str, value: Any, rows: int, num_pieces: int) -> Sequence[Any]:
    """Return an entry's part for each micro-batch."""
    dim = _sample_dim(key, value, rows)
    if dim is not None:
        return value.tensor_split(num_pieces, dim=dim)
    if isinstance(value, Tensor) and _has_several_rows(key, value, rows):
        pieces = value.unflatten(0, (rows, -1)).tensor_split(num_pieces)
        return [piece.flatten(0, 1) for piece in pieces]
    if isinstance(value, list) and len(value) == rows:
        return [[value[row] for row in piece.tolist()] for piece in torch.arange(rows).tensor_split(num_pieces)]
    return [value] * num_pieces


def _labels_of_masked(batch: Mapping[str, Any], num_pieces: int) -> list[Tensor] | None:
    """Return each part's labels if they are a list, of the masked patches of all samples (BEiT); None for others."""
    labels, masked = batch["labels"], batch.get("bool_masked_pos")
    if not isinstance(labels, Tensor) or not isinstance(masked, Tensor) or (labels.dim(), masked.dim()) != (1, 2):
        return None
    counts = [int(part.sum()) for part in masked.bool().tensor_split(num_pieces)]
    return list(labels.split(counts)) if sum(counts) == len(labels) else None


def _sample_dim(key: str, value: Any, rows: int) -> int | None:
    """Return the sample dim of an entry; None if all samples share the entry."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    # Multimodal rotary positions are [time/height/width, batch, seq].
    dim = 1 if key == "position_ids" and value.dim() == 3 else 0
    return dim if value.shape[dim] == rows else None


def _has_several_rows(key: str, value: Tensor, rows: int) -> bool:
    return key in _SEVERAL_ROWS and value.dim() > 1 and rows > 0 and value.shape[0] % rows == 0


def stand_in(batch: Mapping[str, Any], tokens: Mapping[str, int] = MappingProxyType({})) -> dict[str, Any]:
    """Return a placeholder sample for an empty share: zeros, masks that hide nothing, and positions from 0 on.

    Args:
        batch: the share.
        tokens: of images and sounds, which the sample has none of; see `media_tokens`.
    """
    rows = num_rows(batch)

    def sample(name: str, value: Any) -> Any:
        if isinstance(value, list) and len(value) == rows:  # entries of single samples, as the targets of a detector
            return []
        dim = _sample_dim(name, value, rows)
        if dim is None:
            is_flat = isinstance(value, Tensor) and _has_several_rows(name, value, rows)
            return value.new_zeros(len(value) // rows, *value.shape[1:]) if is_flat else value
        if name == "position_ids" and value.dim() > 1:  # zeros would be a document for each token
            length = value.shape[-1]
            return torch.arange(length, device=value.device).expand(*value.shape[:dim], 1, *value.shape[dim + 1 :])
        return value.new_full((*value.shape[:dim], 1, *value.shape[dim + 1 :]), int("mask" in name))

    return {name: sample(name, value) for name, value in without_media(batch, tokens).items()}


def without_rows(outputs: Any) -> Any:
    """Remove the placeholder sample from `outputs`."""
    if isinstance(outputs, Tensor):
        return outputs[:0] if outputs.dim() else outputs
    if isinstance(outputs, Mapping):
        return type(outputs)(**{key: without_rows(value) for key, value in outputs.items()})
    return tuple(map(without_rows, outputs)) if isinstance(outputs, tuple) else outputs


def nothing_of(outputs: Any) -> Tensor:
    """Return a zero (0-d) that depends on all outputs, so that its backward pass goes through the whole model."""
    values = outputs.values() if isinstance(outputs, Mapping) else [outputs]
    return sum(
        joined_blocks(value, -1).sum() * 0.0
        for value in values
        if isinstance(value, Tensor) and value.is_floating_point()
    )


def signature(batch: Mapping[str, Any]) -> tuple:
    """Return what determines the shapes of a stage's activations; neighbouring stages compute the same."""
    return tuple((key, tuple(value.shape) if isinstance(value, Tensor) else None) for key, value in batch.items())


def to_device(
    batch: Mapping[str, Any], device: torch.device, dtype: torch.dtype | None, uncast: Collection[str] = ()
) -> dict[str, Any]:
    """Move tensors to `device`; cast floating-point ones to `dtype`, if given, except those named in `uncast`.

    A list with a mapping for each sample, as the targets of a detector, is moved and cast too.
    """

    def move(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [to_device(item, device, dtype, uncast) if isinstance(item, Mapping) else item for item in value]
        if not isinstance(value, Tensor):
            return value
        casts = value.is_floating_point() and key not in uncast
        return value.to(device, dtype if casts else None, non_blocking=True)

    return {key: move(key, value) for key, value in batch.items()}
