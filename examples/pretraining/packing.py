"""Rows of one length, made of documents of any length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def pack(documents: Iterable[Sequence[int]], length: int) -> list[dict[str, Tensor]]:
    """Put documents into rows, each into the first row that has room (first fit); longer ones are cut to pieces.

    Args:
        documents: token ids of each document.
        length: tokens of a row.

    Returns:
        Rows of `input_ids`, `position_ids` and `labels`, each [length]. Positions restart where a document starts, so
        that attention keeps documents apart; no label asks for the first token of a document, or for what fills a row.
    """
    pieces = [document[start : start + length] for document in documents for start in range(0, len(document), length)]
    rows: list[list[Sequence[int]]] = []
    room: list[int] = []
    first = 0  # rows before it are full
    for piece in pieces:
        row = next((index for index in range(first, len(rows)) if room[index] >= len(piece)), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(length)
        rows[row].append(piece)
        room[row] -= len(piece)
        while first < len(rows) and room[first] == 0:
            first += 1
    return [_row(pieces, length) for pieces in rows]


def _row(pieces: Sequence[Sequence[int]], length: int) -> dict[str, Tensor]:
    filling = length - sum(map(len, pieces))
    ids = [token for piece in pieces for token in piece]
    positions = [position for piece in pieces for position in range(len(piece))]
    labels = [label for piece in pieces for label in (-100, *piece[1:])]
    return {
        "input_ids": torch.tensor(ids + [0] * filling),
        "position_ids": torch.tensor(positions + list(range(filling))),
        "labels": torch.tensor(labels + [-100] * filling),
    }
