"""Files of snapshots: what one rank leaves of the training state in memory, its copy next door, and the newest.

A piece is a safetensors file with the rectangles of whole tensors that the rank writes to a checkpoint, and a JSON file
that describes them. The JSON file appears last, by a rename: a piece without it is not complete. Pieces of the last two
snapshots are kept, because a rank may die while it writes the newer one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from booster.errors import ConfigurationError
from booster.launch import elastic_place
from plugins.hybrid_parallel.checkpoint.files.tensor_file import TensorFileWriter
from plugins.hybrid_parallel.checkpoint.state.global_tensor import GlobalTensor
from plugins.hybrid_parallel.checkpoint.state.manifest import chunk_key
from plugins.hybrid_parallel.distributed.agreement import all_gather_json, raise_on_all_ranks
from shardformer.utils.typed_json import read_json_object

_DATA, _HEADER = ".safetensors", ".json"
FORMAT = 1


@dataclass(frozen=True, order=True)
class Piece:
    """Name of a piece.

    Attributes:
        number: of the snapshot, which grows while a job lasts.
        round: of the elastic job; 0 without one.
        world_size: number of ranks, each of which has left a piece.
        rank: the rank that has left this one.
    """

    number: int
    round: int
    world_size: int
    rank: int

    @property
    def stem(self) -> str:
        """File name without its suffix."""
        return f"{self.number}.{self.round}.{self.world_size}.{self.rank}"

    def data_in(self, directory: Path) -> Path:
        """Return the path of the tensors."""
        return directory / f"{self.stem}{_DATA}"

    def header_in(self, directory: Path) -> Path:
        """Return the path of the description."""
        return directory / f"{self.stem}{_HEADER}"


def pieces_in(directory: Path) -> Iterator[Piece]:
    """Yield the complete pieces in a directory."""
    if directory.is_dir():
        for name in os.listdir(directory):
            if name.endswith(_HEADER) and not name.startswith("."):
                numbers = name.removesuffix(_HEADER).split(".")
                if len(numbers) == 4 and all(each.isdecimal() for each in numbers):
                    yield Piece(*map(int, numbers))


def write_piece(piece: Piece, directory: Path, tensors: Mapping[str, GlobalTensor], header: dict[str, Any]) -> None:
    """Write a piece.

    Args:
        piece: its name.
        directory: where.
        tensors: rectangles of whole tensors on this rank.
        header: the rest of the state, as JSON; `tensors` is added to it.

    Raises:
        ConfigurationError: there is not enough memory.
    """
    entries, described = {}, {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        described[name] = [
            list(tensor.shape),
            dtype,
            [[list(each.offsets), list(each.sizes), str(piece.rank), 0] for each in tensor.rectangles],
        ]
        entries |= {chunk_key(name, each.offsets): (tensor.dtype, each.sizes) for each in tensor.rectangles}
    with _naming_space(directory):
        with TensorFileWriter(piece.data_in(directory), entries) as file:
            for name, tensor in tensors.items():
                for each in tensor.rectangles:
                    file.write(chunk_key(name, each.offsets), each.values)
        publish(piece, directory, json.dumps({"format": FORMAT, **header, "tensors": described}).encode())


def publish(piece: Piece, directory: Path, header: bytes) -> None:
    """Write the description of a piece whose tensors are written; now it is complete."""
    path = piece.header_in(directory)
    hidden = path.with_name(f".{path.name}")
    hidden.write_bytes(header)
    hidden.rename(path)


def read_header(piece: Piece, directory: Path) -> dict[str, Any]:
    """Return the description of a piece.

    Raises:
        ConfigurationError: it is damaged, or of another version of this package.
    """
    try:
        header = read_json_object(piece.header_in(directory))
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    if header.get("format") != FORMAT:
        raise ConfigurationError(
            f"{piece.header_in(directory)} has the format {header.get('format')}, and this package reads {FORMAT}; "
            "remove it"
        )
    return header


def remove_before(number: int, directory: Path) -> None:
    """Remove the pieces of snapshots with lower numbers; other ranks of the machine may do the same."""
    for name in os.listdir(directory):
        first = name.removeprefix(".").partition(".")[0]
        if first.isdecimal() and int(first) < number:
            with contextlib.suppress(FileNotFoundError):
                (directory / name).unlink()


@contextlib.contextmanager
def _naming_space(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigurationError(
            f"a snapshot does not fit into {directory.parent}, which has {_free(directory) / 2**20:.0f} MiB left; give "
            "booster run --snapshot-dir a directory with space for two snapshots"
        ) from None


def _free(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


class Neighbours:
    """Who sends copies of pieces to whom.

    Args:
        machines: machine of each rank.
        group: CPU group of all ranks.
    """

    def __init__(self, machines: list[int], group: ProcessGroup) -> None:
        self._group, self._rank = group, dist.get_rank()
        ranks_of: dict[int, list[int]] = {}
        for rank, machine in enumerate(machines):
            ranks_of.setdefault(machine, []).append(rank)
        rows = list(ranks_of.values())
        self.target: dict[int, int] = {}  # rank -> rank of the next machine that keeps its copy
        if len(rows) > 1:
            for index, row in enumerate(rows):
                there = rows[(index + 1) % len(rows)]
                self.target |= {rank: there[position % len(there)] for position, rank in enumerate(row)}

    def exchange(self, piece: Piece, directory: Path) -> None:
        """Send this rank's piece, and keep those of others; all ranks call this together.

        Args:
            piece: complete piece of this rank.
            directory: pieces of this machine.
        """
        if not self.target:
            return
        sources = [rank for rank, target in self.target.items() if target == self._rank]
        own = [_bytes_of(piece.data_in(directory)), _bytes_of(piece.header_in(directory))]
        sizes = {rank: torch.zeros(2, dtype=torch.int64) for rank in sources}
        self._transfer([torch.tensor([each.numel() for each in own])], {rank: [each] for rank, each in sizes.items()})
        room = {
            rank: [torch.empty(int(size), dtype=torch.uint8) for size in each.tolist()] for rank, each in sizes.items()
        }
        self._transfer(own, room)
        for rank, (data, header) in room.items():
            copy = Piece(piece.number, piece.round, piece.world_size, rank)
            copy.data_in(directory).write_bytes(data.numpy().data)
            publish(copy, directory, header.numpy().tobytes())

    def _transfer(self, sent: list[Tensor], received: dict[int, list[Tensor]]) -> None:
        group, target = self._group, self.target[self._rank]
        works = [dist.isend(each, group=group, group_dst=target) for each in sent]
        works += [dist.irecv(each, group=group, group_src=rank) for rank, parts in received.items() for each in parts]
        for work in works:
            work.wait()


def _bytes_of(path: Path) -> Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


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
