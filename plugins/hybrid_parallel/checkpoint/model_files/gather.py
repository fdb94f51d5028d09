"""Gathering of sharded tensors on the first rank of a process group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardformer.shard_spec import ShardSpec, spec_of


@dataclass
class Gather:
    """A gather in progress of one tensor to the first rank of its group.

    Attributes:
        local: shard of this rank.
        spec: sharding of the tensor.
        others: on the first rank, the shards of the other ranks, by rank.
        requests: pending send and receive operations.
    """

    local: Tensor
    spec: ShardSpec
    others: dict[int, Tensor] = field(default_factory=dict)
    requests: list[Any] = field(default_factory=list)

    @staticmethod
    def begin(tensor: Tensor, dtype: torch.dtype | None, group: dist.ProcessGroup) -> Gather:
        """Start to send this rank's shard, or to receive the other shards; all ranks of the group must call it.

        Args:
            tensor: parameter or buffer; it must not change before the gather has finished.
            dtype: target dtype of a floating-point tensor; None keeps its dtype.
            group: process group that shards the tensor.
        """
        local, spec = tensor.detach(), spec_of(tensor)
        if dtype is not None and local.is_floating_point():
            local = local.to(dtype)
        local = local.contiguous()
        gather = Gather(local, spec)
        if spec.dim is None:
            return gather
        if spec.rank > 0:
            if spec.is_owner and local.numel():
                gather.requests.append(dist.isend(_bytes(local), group=group, group_dst=0))
            return gather
        for rank in range(1, spec.world_size):
            there = spec.on_rank(rank)
            if there.is_owner:
                piece = gather.others[rank] = local.new_empty(there.local_shape)
                if piece.numel():
                    gather.requests.append(dist.irecv(_bytes(piece), group=group, group_src=rank))
        return gather

    def finish(self) -> Tensor | None:
        """Wait for the gather, and return the full tensor on the first rank and None on the others."""
        for request in self.requests:
            request.wait()
        if self.spec.rank > 0:
            return None
        if self.spec.dim is None:
            return self.local
        full = self.local.new_empty(self.spec.full_shape)
        for rank, piece in {0: self.local, **self.others}.items():
            self.spec.on_rank(rank).fill(full, piece)
        return full


def send(tensor: Tensor, to: int, group: dist.ProcessGroup) -> None:
    """Send a contiguous tensor to rank `to` of a group, which calls `receive`."""
    if tensor.numel():
        dist.send(_bytes(tensor), group=group, group_dst=to)


def receive(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Fill `tensor` with the values that rank `source` of a group sends."""
    if tensor.numel():
        dist.recv(_bytes(tensor), group=group, group_src=source)


def _bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes, because no backend supports all dtypes."""
    return tensor.view(-1).view(torch.uint8)
