"""Pieces of snapshots: what one rank leaves of the training state in the memory of a machine.

A piece is a safetensors file with the rectangles of whole tensors that the rank writes to a checkpoint, and a JSON file
that describes them. The JSON file appears last, by a rename: a piece without it is not complete. Pieces of the last two
snapshots are kept, because a rank may die while it writes the newer one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint.files.tensor_file import TensorFileWriter
from plugins.hybrid_parallel.checkpoint.state.global_tensor import GlobalTensor
from plugins.hybrid_parallel.checkpoint.state.manifest import chunk_key
from shardformer.utils.json import read_json_object

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
