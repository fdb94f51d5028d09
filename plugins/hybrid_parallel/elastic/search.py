"""Search for the newest snapshot of which every piece still exists on some machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from booster.launch import elastic_place
from plugins.hybrid_parallel.distributed.agreement import all_gather_json, raise_on_all_ranks
from plugins.hybrid_parallel.elastic.pieces import Piece, pieces_in, read_header

_KEPT = "memory-of-*"  # where agents keep the pieces of jobs that have ended


@dataclass(frozen=True)
class FoundSnapshot:
    """A snapshot that is complete.

    Attributes:
        pieces: its pieces, in the order of the ranks that have left them.
        here: piece -> directory, of those that this rank can read.
        holders: ranks that can read each piece.
        headers: description of each piece.
    """

    pieces: Sequence[Piece]
    here: dict[Piece, Path]
    holders: Sequence[Sequence[int]]
    headers: Sequence[dict[str, Any]]

    @property
    def number(self) -> int:
        """Number of the snapshot."""
        return self.pieces[0].number

    @property
    def state(self) -> dict[str, Any]:
        """What is the same on all ranks."""
        return self.headers[0]["state"]


def newest_snapshot(folder: Path | None, group: ProcessGroup) -> FoundSnapshot | None:
    """Return the newest complete snapshot in the memory of all machines, and in a folder on disk; None without one.

    Args:
        folder: folder of the checkpoints; None to search in memory only.
        group: CPU group of all ranks, which must all call this.

    Raises:
        ConfigurationError: a piece is damaged; raised on all ranks.
    """
    here = _pieces_here(folder)
    names = [[piece.number, piece.round, piece.world_size, piece.rank] for piece in here]
    holders: dict[Piece, list[int]] = {}
    for rank, found in enumerate(all_gather_json(names, group)):
        for name in found:
            holders.setdefault(Piece(*name), []).append(rank)
    for last in sorted(holders, reverse=True):
        pieces = [Piece(last.number, last.round, last.world_size, rank) for rank in range(last.world_size)]
        if all(piece in holders for piece in pieces):
            return _described(pieces, here, [holders[piece] for piece in pieces], group)
    return None


def _pieces_here(folder: Path | None) -> dict[Piece, Path]:
    place = elastic_place()
    directories = [] if folder is None else sorted(folder.glob(_KEPT))
    directories += [] if place is None else [place.pieces]
    return {piece: directory for directory in directories for piece in pieces_in(directory)}


def _described(
    pieces: list[Piece], here: dict[Piece, Path], holders: list[list[int]], group: ProcessGroup
) -> FoundSnapshot:
    """Exchange the descriptions of the pieces; each comes from the first rank that can read it."""
    rank = dist.get_rank()

    def read() -> dict[str, Any]:
        own = [piece for piece, readers in zip(pieces, holders, strict=True) if readers[0] == rank]
        return {str(piece.rank): read_header(piece, here[piece]) for piece in own}

    found: dict[str, Any] = {}
    for each in all_gather_json(raise_on_all_ranks(read, group), group):
        found |= each
    headers = [found[str(piece.rank)] for piece in pieces]
    return FoundSnapshot(pieces, {piece: here[piece] for piece in pieces if piece in here}, holders, headers)
