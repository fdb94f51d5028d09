"""Gathering of sharded tensors on the first rank of a process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardformer.distributed.process_groups import ProcessGroups
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
        open_communicator(group, local.device)
        if spec.rank > 0:
            if spec.is_owner and local.numel():
                gather.requests = _batched(dist.isend, {0: local}, group)
            return gather
        for rank in range(1, spec.world_size):
            there = spec.on_rank(rank)
            if there.is_owner:
                gather.others[rank] = local.new_empty(there.local_shape)
        gather.requests = _batched(dist.irecv, gather.others, group)
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


def open_communicator(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let NCCL make the group's communicator, if it has none; all ranks of the group must call this.

    Batched messages use it, and then need only the ranks that exchange some. Messages that are not batched would make a
    further communicator, with buffers of its own, for each pair of ranks.
    """
    if device.type != "cpu":
        key = ("communicator", group.group_name)
        ProcessGroups.of_world().get_or_create(
            key, lambda: dist.all_reduce(torch.zeros((), device=device), group=group)
        )


def send(tensor: Tensor, to: int, group: dist.ProcessGroup) -> None:
    """Send a contiguous tensor to rank `to` of a group, which calls `receive`."""
    for request in _batched(dist.isend, {to: tensor}, group):
        request.wait()


def receive(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Fill `tensor` with the values that rank `source` of a group sends."""
    for request in _batched(dist.irecv, {source: tensor}, group):
        request.wait()


def _batched(operation: Callable[..., Any], tensors: Mapping[int, Tensor], group: dist.ProcessGroup) -> list[dist.Work]:
    """Start to send or to receive tensors; each belongs to the peer that is its key."""
    operations = [
        dist.P2POp(operation, _bytes(tensor), group=group, group_peer=peer)
        for peer, tensor in tensors.items()
        if tensor.numel()
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def _bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes, because no backend supports all dtypes."""
    return tensor.view(-1).view(torch.uint8)
