"""Snapshots of an elastic job: written by each rank, copied to the next machine, and read by the next round."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from booster import failure
from booster.elastic.job_environment import FOLDER, MODULES
from booster.launch import job_store, machine_of_this_rank
from plugins.hybrid_parallel.checkpoint.global_tensor import buffers_of_earlier_stages
from plugins.hybrid_parallel.checkpoint.io import HybridParallelCheckpointIO
from plugins.hybrid_parallel.checkpoint.training_state import (
    Piece,
    newest_snapshot,
    pieces_in,
    publish,
    remove_before,
    take_snapshot,
    write_piece,
)
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.elastic.layouts import PlansAhead, StepBoundary
from plugins.hybrid_parallel.guards import check_boosted
from shardformer.distributed.process_groups import all_gather_json


class ElasticCheckpointIO(HybridParallelCheckpointIO):
    """Adds snapshots in the memory of the machines to checkpoints; a job continues from the newer of the two.

    Args:
        plans: layouts for other numbers of ranks.
    """

    def __init__(self, mesh: HybridMesh, plans: PlansAhead) -> None:
        super().__init__(mesh)
        self._place, self._plans = plans.place, plans
        self._number = self._complete = 0  # of the last snapshot, and of the newest that all ranks have written
        self._boundary: StepBoundary | None = None

    @failure.guard("booster.snapshot")
    def snapshot(self, folder: str, objects: dict[str, Any], extra: dict[str, Any]) -> None:
        """Leave the training state in the memory of the machines; the next round of an elastic job goes on from it.

        Args:
            folder: folder of the checkpoints.
            objects: objects to save, by kind ("model", "optimizer", "lr_scheduler", "dataloader").
            extra: additional values of the user.

        Raises:
            ConfigurationError: the arguments are invalid, gradients are accumulated, or the memory is full.
        """
        check_boosted(objects)
        if objects.get("optimizer") is not None:
            objects["optimizer"].refuse_accumulated()
        is_first = self._boundary is None
        if is_first:
            self._begin(folder, objects.get("model"))
        state = take_snapshot(self.mesh, objects, extra, self._elsewhere)
        # All ranks have written the last one, or gone on from it: none can finish a step without the others.
        remove_before(self._complete, self._place.pieces)
        piece = Piece(self._number + 1, self._place.round, dist.get_world_size(), dist.get_rank())
        write_piece(piece, self._place.pieces, state, self._plans.known())
        self._neighbours.exchange(piece, self._place.pieces)
        self._number = self._complete = piece.number
        if is_first:
            self._place.note("first_step", rank=dist.get_rank(), number=self._number)
            if self._place.get(MODULES) is None:
                self._place.put(MODULES, list(_installed_modules(dict(sys.modules))))
        self._plans.begin(objects.get("model"), objects.get("dataloader"))
        self._boundary.pass_or_leave(self._number)

    def load_checkpoint(self, directory: str, objects: dict[str, Any], resume: str | None = None) -> dict[str, Any]:
        """Read a checkpoint, or the newest snapshot in memory if it is newer."""
        extra = super().load_checkpoint(directory, objects, resume)
        self._place.note("moved", rank=dist.get_rank())
        return extra

    def _snapshot_folders(self, folder: Path | None) -> list[Path]:
        return [*super()._snapshot_folders(folder), self._place.pieces]

    def _begin(self, folder: str, model: Any) -> None:
        """Prepare the snapshots of this round."""
        self._elsewhere = set() if model is None else buffers_of_earlier_stages(model, self.mesh, self.group)
        left = max((piece.number for piece in pieces_in(self._place.pieces)), default=0)  # by earlier rounds
        names, numbers = zip(*all_gather_json([machine_of_this_rank(), left], self.group), strict=True)
        self._neighbours = Neighbours([names.index(name) for name in names], self.group)
        found = newest_snapshot([self._place.pieces], self.group)
        self._number, self._complete = max(numbers), 0 if found is None else found.number
        self._boundary = StepBoundary(self._place, job_store(), dist.get_rank())
        self._place.put(FOLDER, str(Path(folder).resolve()))


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


def _installed_modules(modules: dict[str, ModuleType]) -> Iterator[str]:
    """Yield the modules of installed packages and of this one, in the order in which they were imported."""
    ours = Path(__file__).resolve().parents[3]
    for name, module in modules.items():
        file = getattr(module, "__file__", None) or ""
        is_ours = file.startswith(str(ours)) and name.partition(".")[0] in ("booster", "plugins", "shardformer")
        if is_ours or "site-packages" in file:
            yield name
