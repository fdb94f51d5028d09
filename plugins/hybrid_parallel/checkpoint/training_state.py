"""The complete training state of a rank: its snapshot, its restoration, and snapshots in the memory of its machine.

A piece is what one rank writes of a snapshot in memory: a safetensors file, and a JSON file that describes it. The JSON
file appears last, by a rename: a piece without it is not complete. Pieces of the last two snapshots are kept, because a
rank may die while it writes the newer one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from booster.plugin import take_state
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.checkpoint import optimizer_state
from plugins.hybrid_parallel.checkpoint.checks import check_optimizer_state
from plugins.hybrid_parallel.checkpoint.dcp_storage import Ints, read_from_ranks, write_tensors
from plugins.hybrid_parallel.checkpoint.global_tensor import GlobalTensor, clear_padding, model_tensors, tensors_to_fill
from plugins.hybrid_parallel.checkpoint.tensor_file import Manifest, SavedFile, merge_tensors, name_and_offsets
from plugins.hybrid_parallel.data.dataloader import ShardedDataLoader
from plugins.hybrid_parallel.data.sharded_sampler import DataParallelBatchSampler
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.distributed.mesh import AXES, HybridMesh
from shardformer.distributed.process_groups import all_gather_json
from shardformer.utils.typed_json import from_json, read_json_object, to_json

PREFIX = "random/"
_STREAM = "stream_"
_PYTHON_VERSION = 3  # version number in the tuple of random.getstate


def random_tensors(model: HybridParallelModel | None, mesh: HybridMesh) -> dict[str, GlobalTensor]:
    """Return the current random states of this rank, and once those of its replica."""
    states = {"torch_cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["torch_cuda"] = torch.cuda.get_rng_state()
    if model is not None and model.stream is not None:
        states |= {f"{_STREAM}{key}": value for key, value in model.stream.state_dict().items()}
    _, words, gauss = random.getstate()
    states["python"] = torch.tensor(words, dtype=torch.int64)
    states["python_gauss"] = torch.tensor([] if gauss is None else [gauss], dtype=torch.float64)
    if "numpy" in sys.modules:
        _, words, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        states["numpy"] = torch.tensor([*words.tolist(), position, has_gauss], dtype=torch.int64)
        states["numpy_gauss"] = torch.tensor(gauss, dtype=torch.float64)
    found = {f"{_own_prefix()}{key}": value for key, value in states.items()}
    if is_first_of(mesh):  # what a replica draws by itself, such as tokens, goes on under another layout
        of_replica = {key: value for key, value in states.items() if not key.startswith(_STREAM)}
        found |= {f"{_replica_prefix(mesh)}{key}": value for key, value in of_replica.items()}
    return {name: GlobalTensor.whole(value.clone()) for name, value in found.items()}


def is_first_of(mesh: HybridMesh) -> bool:
    """Return whether this is the first rank of its replica."""
    return not any(mesh.rank(axis) for axis in AXES if axis != "dp")


class RandomLoad:
    """Random states of this rank that are being loaded: buffers to fill, then to apply.

    Args:
        saved: name -> saved tensor, for all tensors of the checkpoint.
        replica_of: the mesh, to load the states of a replica under another layout; None for those of the rank.
    """

    def __init__(self, model: HybridParallelModel | None, saved: Any, replica_of: HybridMesh | None = None) -> None:
        self.model = model
        prefix = _own_prefix() if replica_of is None else _replica_prefix(replica_of)
        self._states = {
            name.removeprefix(prefix): torch.empty(tensor.shape, dtype=tensor.torch_dtype)
            for name, tensor in saved.items()
            if name.startswith(prefix)
        }
        self.tensors = {f"{prefix}{key}": GlobalTensor.whole(value) for key, value in self._states.items()}

    def apply(self) -> None:
        """Set the generators to the loaded states; a generator without a saved state is not changed."""
        states = self._states
        if "torch_cpu" in states:
            torch.set_rng_state(states["torch_cpu"])
        if "torch_cuda" in states and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(states["torch_cuda"])
        stream = {key.removeprefix(_STREAM): value for key, value in states.items() if key.startswith(_STREAM)}
        if self.model is not None and self.model.stream is not None and stream:
            self.model.stream.load_state_dict(stream)
        if "python" in states:
            gauss = states["python_gauss"].tolist()
            random.setstate((_PYTHON_VERSION, tuple(states["python"].tolist()), gauss[0] if gauss else None))
        if "numpy" in states:
            import numpy as np

            *words, position, has_gauss = states["numpy"].tolist()
            words = np.array(words, dtype=np.uint32)
            np.random.set_state(("MT19937", words, position, has_gauss, states["numpy_gauss"].item()))


def _own_prefix() -> str:
    return f"{PREFIX}{dist.get_rank()}/"


def _replica_prefix(mesh: HybridMesh) -> str:
    return f"{PREFIX}replica_{mesh.rank('dp')}/"


_PLAIN = ("lr_scheduler", "dataloader")  # kinds whose state is in the manifest


@dataclass
class StateSnapshot:
    """A training state at one point in time."""

    tensors: dict[str, GlobalTensor]  # tensors that this rank writes
    numbers: dict[str, Any]  # optimizer numbers of this rank
    state: dict[str, Any]  # state that is identical on all ranks, as typed JSON; a copy


def manifest_of(
    state: dict[str, Any],
    parts: Sequence[Sequence[Any]],
    sequence: int = 0,
    files: dict[str, SavedFile] | None = None,
) -> Manifest:
    """Return a state's manifest; `state`: the same on all ranks; `parts`: of each rank, tensors and numbers."""
    if state["optimizer"] is not None:
        state = {
            **state,
            "optimizer": {**state["optimizer"], **optimizer_state.merge_numbers([numbers for _, numbers in parts])},
        }
    return Manifest(sequence, files or {}, merge_tensors([tensors for tensors, _ in parts]), state)


def take_snapshot(
    mesh: HybridMesh, objects: dict[str, Any], extra: dict[str, Any], elsewhere: Collection[str]
) -> StateSnapshot:
    """Return the state, as views of live tensors; `elsewhere`: model buffers that another stage writes."""
    model, optimizer = objects.get("model"), objects.get("optimizer")
    if optimizer is not None:
        optimizer.refuse_accumulated()
    tensors = random_tensors(model, mesh)
    if model is not None:
        tensors |= model_tensors(model, mesh, elsewhere)
    if optimizer is not None:
        tensors |= optimizer_state.optimizer_tensors(optimizer)
    try:
        state = {
            "layout": {axis: mesh.size(axis) for axis in AXES},
            "step": None if optimizer is None else optimizer.num_steps,
            "optimizer": None if optimizer is None else optimizer_state.optimizer_header(optimizer),
            **{kind: _state_of(objects.get(kind), kind) for kind in _PLAIN},
            "extra": {name: to_json(value, name) for name, value in extra.items()},
        }
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    return StateSnapshot(tensors, {} if optimizer is None else optimizer_state.optimizer_numbers(optimizer), state)


def _state_of(given: Any, kind: str) -> Any:
    return None if given is None else to_json(given.state_dict(), f"{kind}.state_dict()")


def restore(
    mesh: HybridMesh,
    objects: dict[str, Any],
    fill: Callable[[Mapping[str, GlobalTensor]], None],
    manifest: Manifest,
    group: dist.ProcessGroup,
    with_random: bool = True,
) -> None:
    """Replace the current state by that of a checkpoint.

    The random states of a rank are restored if the layout is the same, and those of its replica if there are as many.
    Nothing is changed until everything is known to fit. An I/O error while tensors are read leaves a mix of both
    states.

    Args:
        fill: reads saved tensors into memory of this rank; all ranks call it equally often.
        group: group of all ranks; an error on one is raised on all.
        with_random: whether to restore random states at all.

    Raises:
        ConfigurationError: the checkpoint was saved from different objects.
    """
    model, optimizer = map(objects.get, ("model", "optimizer"))
    saved, same_layout = manifest.state["layout"], manifest.state["layout"] == {axis: mesh.size(axis) for axis in AXES}

    def prepare() -> list[Any]:
        if optimizer is not None:
            check_optimizer_state(optimizer, manifest.state["optimizer"])
        loads: list[Any] = [] if optimizer is None else [optimizer_state.OptimizerLoad(optimizer, manifest)]
        known = with_random and (same_layout or saved.get("dp") == mesh.size("dp"))
        return loads + ([RandomLoad(model, manifest.tensors, None if same_layout else mesh)] if known else [])

    def read() -> None:
        if model is not None:
            clear_padding(model)
            fill(wanted)
            for each in model.optimizers:
                each.refresh_masters()
        for load in loads:
            fill(load.tensors)
            load.apply()

    def take_plain() -> None:
        for kind in _PLAIN:
            if objects.get(kind) is not None and manifest.state[kind] is not None:
                take_state(objects[kind], from_json(manifest.state[kind]), kind)

    loads = raise_on_all_ranks(prepare, group)
    wanted = {} if model is None else tensors_to_fill(model, manifest, group)
    raise_on_all_ranks(take_plain, group)  # the last step that may fail before tensors are changed
    raise_on_all_ranks(read, group)
    if optimizer is not None:
        optimizer.publish_masters()
        optimizer.num_steps = manifest.state["step"] or 0
    if model is not None and manifest.state["step"]:
        model.checked_full_batch = True  # the next batch may be the short last one of an epoch
    if with_random and not same_layout and model is not None and model.stream is not None:
        model.stream.restart(manifest.state["step"] or 0)


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
    """Write a piece, or raise a ConfigurationError for want of memory; `plans`: for the next round, as JSON."""
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
        here: files that this rank can read.

    Attributes:
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
    """Have a loader yield a saved one's global batches, which scripts may tie to the number of replicas."""
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
