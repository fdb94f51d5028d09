"""Borders of documents in a row, as collators for flash-attn give them, turned into positions that restart.

`DataCollatorWithFlattening` and its like name the borders (`cu_seq_lens_q/k`, `max_length_q/k`), number the documents
(`seq_idx`), or number the tokens of each (`position_ids`). Every attention here is told of documents by the positions,
and each micro-batch gets the borders of its own documents again where flash-attn runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from booster.errors import ConfigurationError
from shardformer.attention.packed_documents import document_starts
from shardformer.utils.structure import cache_name

_BORDERS, _LENGTHS, _NUMBERS = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k"), "seq_idx"
_AGAINST = ("attention_mask", "use_cache")
NAMES = (*_BORDERS, *_LENGTHS, _NUMBERS)  # of entries that name documents
_RULE = "the rows of a batch are whole documents one behind the other"


def tokens_of(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the tokens of a batch, [rows, seq], or their embeddings, [rows, seq, hidden]; None if it has neither."""
    return next((batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None)


def with_positions(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch whose documents are told by `position_ids` alone, [rows, seq], which restart at each of them.

    Borders count the tokens of all rows, as flash-attn counts them. If positions are given, they stay as they are.
    """
    named = [name for name in NAMES if batch.get(name) is not None]
    rest = {name: value for name, value in batch.items() if name not in NAMES}
    tokens = tokens_of(batch)
    if not named or tokens is None:
        return dict(batch)
    rows, length = tokens.shape[:2]
    if not rows:  # an empty share of a batch has the entries of the others
        return {"position_ids": tokens.new_zeros((0, length), dtype=torch.long), **rest}
    against = next(
        (name for name in _AGAINST if batch.get(name) is not None and batch[name] is not False), cache_name(batch)
    )
    if against is not None:
        raise ConfigurationError(
            f"the batch has {named[0]}, which keeps documents in a row apart, and {against}, which lets them see each "
            "other; leave one of them out"
        )
    starts = _starts(batch, rows, length)
    if starts is None:
        return {name: value for name, value in batch.items() if name not in _LENGTHS}
    _check_longest(batch, starts, rows * length)
    positions = batch.get("position_ids")
    if positions is None:
        positions = _positions(starts, rows, length).to(tokens.device)
    else:
        _check_positions(positions, starts, rows, length)
    return {**rest, "position_ids": positions}


def _starts(batch: Mapping[str, Any], rows: int, length: int) -> list[int] | None:
    """Return where documents start, counted in all rows, as the entries that name borders say; None if none does."""
    found: dict[str, list[int]] = {}
    for name in _BORDERS:
        if batch.get(name) is not None:
            found[name] = _checked(name, torch.as_tensor(batch[name]), rows, length)
    if batch.get(_NUMBERS) is not None:
        numbers = torch.as_tensor(batch[_NUMBERS])
        if tuple(numbers.shape) != (rows, length):
            raise ConfigurationError(
                f"{_NUMBERS} has shape {tuple(numbers.shape)}, and the tokens {(rows, length)}; give each token the "
                "number of its document"
            )
        changes = numbers.diff(dim=-1, prepend=numbers[:, :1] - 1) != 0
        found[_NUMBERS] = changes.flatten().nonzero()[:, 0].tolist()
    if not found:
        return None
    (first, starts), *others = found.items()
    for name, each in others:
        if each != starts:
            raise ConfigurationError(_contradiction(name, each, first, starts))
    return starts


def _checked(name: str, borders: Tensor, rows: int, length: int) -> list[int]:
    """Return the starts of documents in borders [documents + 1], after checking that they fit the rows."""
    given, total = borders.flatten().tolist(), rows * length
    if borders.dim() != 1 or len(given) < 2 or given[0] != 0:
        raise ConfigurationError(
            f"{name} has shape {tuple(borders.shape)} and starts with {given[0] if given else 'nothing'}; give the "
            f"borders of all documents as one row of numbers from 0 to {total}"
        )
    fall = next((place for place in range(1, len(given)) if given[place] <= given[place - 1]), None)
    if fall is not None:
        raise ConfigurationError(
            f"{name} has {given[fall]} behind {given[fall - 1]}, and borders of documents increase; leave out empty "
            "documents, and sort the others"
        )
    if given[-1] != total:
        raise ConfigurationError(
            f"{name} ends at {given[-1]}, and the batch has {total} tokens ({rows} x {length}); {_RULE}, so that the "
            f"last border is {total}"
        )
    spanned = sorted(set(range(0, total, length)) - set(given))
    if spanned:
        raise ConfigurationError(
            f"{name} has no border at token {spanned[0]}, where row {spanned[0] // length} starts; {_RULE}"
        )
    return given[:-1]


def _check_longest(batch: Mapping[str, Any], starts: list[int], total: int) -> None:
    longest = max(end - start for start, end in zip(starts, [*starts[1:], total], strict=True))
    for name in _LENGTHS:
        if batch.get(name) is not None and int(batch[name]) < longest:
            raise ConfigurationError(
                f"{name}={int(batch[name])} is less than the {longest} tokens of the longest document; use "
                f"{name}={longest}"
            )


def _check_positions(positions: Tensor, starts: list[int], rows: int, length: int) -> None:
    if positions.dim() != 2 or positions.shape[1] != length or positions.shape[0] not in (1, rows):
        raise ConfigurationError(
            f"position_ids of shape {tuple(positions.shape)} cannot be compared with the borders of documents in "
            f"{rows} x {length} tokens; give one of them"
        )
    found = document_starts(positions).expand(rows, -1).flatten().nonzero()[:, 0].tolist()
    if found != starts:
        raise ConfigurationError(_contradiction("position_ids", found, "the borders", starts))


def _contradiction(name: str, found: list[int], other: str, starts: list[int]) -> str:
    place = min(set(found) ^ set(starts))
    one, two = (name, other) if place in found else (other, name)
    return (
        f"{one} in the batch start a document at token {place}, and {two} do not; positions restart where a "
        "document starts, and nowhere else"
    )


def _positions(starts: list[int], rows: int, length: int) -> Tensor:
    """Return [rows, length], the place of each token in its document."""
    firsts = torch.tensor(starts)
    lengths = firsts.diff(append=torch.tensor([rows * length]))
    return (torch.arange(rows * length) - firsts.repeat_interleave(lengths)).view(rows, length)
