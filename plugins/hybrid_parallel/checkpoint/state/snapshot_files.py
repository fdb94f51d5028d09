"""Snapshots: what each rank has left of a training state in the memory of its machine, for a job that continues.

A piece is what one rank writes of a checkpoint: a safetensors file, and a JSON file that describes it. The JSON file
appears last, by a rename: a piece without it is not complete. Pieces of the last two snapshots are kept, because a rank
may die while it writes the newer one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import BatchSampler

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint.state.dcp_storage import Ints, read_from_ranks, write_tensors
from plugins.hybrid_parallel.checkpoint.state.global_tensor import GlobalTensor
from plugins.hybrid_parallel.checkpoint.state.manifest import name_and_offsets
from plugins.hybrid_parallel.checkpoint.state.training_state import StateSnapshot, manifest_of
from plugins.hybrid_parallel.data.dataloader import ShardedDataLoader
from plugins.hybrid_parallel.data.sharded_sampler import DataParallelBatchSampler
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from shardformer.distributed.process_groups import all_gather_json
from shardformer.utils.typed_json import read_json_object

MEMORY = "memory:"  # begins the names of snapshots, where a checkpoint has its path
KEPT = "memory-of-*"  # where agents keep the pieces of jobs that have ended, in the folder of the checkpoints
_DATA, _HEADER = ".safetensors", ".json"
FORMAT = 1


@dataclass(frozen=True, order=True)
class Piece:
    """Name of a piece."""

    number: int  # of the snapshot, which grows while a job lasts
    round: int  # of the elastic job; 0 without one
    world_size: int  # number of ranks, each of which has left a piece
    rank: int  # the rank that has left this one

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


def write_piece(piece: Piece, directory: Path, state: StateSnapshot, plans: dict[str, Any]) -> None:
    """Write a piece.

    Args:
        piece: its name.
        directory: where.
        state: of this rank.
        plans: what the next round is to know besides, as JSON.

    Raises:
        ConfigurationError: there is not enough memory.
    """
    with _naming_space(directory):
        written = write_tensors(state.tensors, piece.data_in(directory))
        header = {"format": FORMAT, "part": [written, state.numbers], "state": state.state, "plans": plans}
        publish(piece, directory, json.dumps(header).encode())


def publish(piece: Piece, directory: Path, header: bytes) -> None:
    """Write the description of a piece whose tensors are written; now it is complete."""
    path = piece.header_in(directory)
    hidden = path.with_name(f".{path.name}")
    hidden.write_bytes(header)
    hidden.rename(path)


def read_header(piece: Piece, directory: Path) -> dict[str, Any]:
    """Return the description of a piece."""
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


class Snapshot:
    """A snapshot that is complete.

    Args:
        pieces: its pieces, in the order of the ranks that have left them.
        headers: their descriptions.
        holders: ranks that can read each piece.
        here: files that this rank can read.

    Attributes:
        number: of the snapshot.
        manifest: describes the tensors of all pieces.
        plans: what the round that has left it wants the next one to know.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        headers: Sequence[dict[str, Any]],
        holders: Sequence[Sequence[int]],
        here: Sequence[Path],
    ) -> None:
        self.number, self.plans = pieces[0].number, headers[0]["plans"]
        self.manifest = manifest_of(headers[0]["state"], [header["part"] for header in headers])
        self._here = here
        # A rank of the machine reads what others of it have left, from the same memory.
        self._holders = {f"{piece.stem}{_DATA}": ranks for piece, ranks in zip(pieces, holders, strict=True)}

    def fill(self, tensors: Mapping[str, GlobalTensor], device: torch.device) -> None:
        """Fill rectangles of this rank; all ranks must call this together. See `read_from_ranks`."""
        read_from_ranks(tensors, self._held, self._holders, self.manifest, device)

    @cached_property
    def _held(self) -> dict[tuple[str, Ints], Tensor]:
        """The chunks in the files that this rank can read, mapped into memory."""
        found = {}
        for path in self._here:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (it is no mapping)
                    found[name_and_offsets(key)] = file.get_tensor(key)
        return found


def newest_snapshot(directories: Iterable[Path], group: ProcessGroup) -> Snapshot | None:
    """Return the newest complete snapshot in directories of all machines; None without one.

    Args:
        directories: where this rank looks for pieces.
        group: CPU group of all ranks, which must all call this.

    Raises:
        ConfigurationError: a piece is damaged; raised on all ranks.
    """
    here = {piece: directory for directory in directories for piece in pieces_in(directory)}
    names = [[piece.number, piece.round, piece.world_size, piece.rank] for piece in here]
    holders: dict[Piece, list[int]] = {}
    for rank, found in enumerate(all_gather_json(names, group)):
        for name in found:
            holders.setdefault(Piece(*name), []).append(rank)
    for last in sorted(holders, reverse=True):
        pieces = [Piece(last.number, last.round, last.world_size, rank) for rank in range(last.world_size)]
        if all(piece in holders for piece in pieces):
            break
    else:
        return None
    firsts = [piece for piece in pieces if holders[piece][0] == dist.get_rank()]  # which this rank describes to all

    def read() -> dict[str, Any]:
        return {str(piece.rank): read_header(piece, here[piece]) for piece in firsts}

    headers: dict[str, Any] = {}
    for each in all_gather_json(raise_on_all_ranks(read, group), group):
        headers |= each
    files = [piece.data_in(here[piece]) for piece in pieces if piece in here]
    return Snapshot(pieces, [headers[str(piece.rank)] for piece in pieces], [holders[each] for each in pieces], files)


def keep_global_batch(loader: Any, saved: dict[str, Any] | None) -> None:
    """Have a loader yield the global batches of a saved one, if its own differ.

    A script that gives each replica a constant number of samples has other global batches under another number of
    replicas.
    """
    if saved is None or not isinstance(loader, ShardedDataLoader) or loader.batch_size is None:
        return
    size, replicas = saved["global_batch_size"], loader.global_batch_size // loader.batch_size
    if size == loader.global_batch_size:
        return
    if size % replicas:
        raise ConfigurationError(
            f"dp_size={replicas} does not divide the global batch of {size} samples, with which the job began; use a "
            "layout whose dp_size divides it"
        )
    sampler = loader.batch_sampler
    if not isinstance(sampler, DataParallelBatchSampler) or type(sampler.batch_sampler) is not BatchSampler:
        raise ConfigurationError(
            f"the job began with a global batch of {size} samples, and this loader has {loader.global_batch_size}; "
            f"make it with batch_size={size} // plugin.dp_size"
        )
    loader.batch_size, loader.global_batch_size = size // replicas, size
    sampler.batch_size = loader.batch_size
    sampler.batch_sampler = BatchSampler(sampler.sampler, loader.batch_size, sampler.drop_last)
