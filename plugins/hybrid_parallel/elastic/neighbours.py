"""Copies of pieces on the next machine, so that the state survives the loss of any one machine."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plugins.hybrid_parallel.elastic.pieces import Piece, publish


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
