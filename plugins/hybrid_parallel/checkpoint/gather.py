"""Gathering of sharded tensors: on the first rank of a group for files, or as a state dict on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.checkpoint.global_tensor import local_tensors
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.guards import WholeState
from plugins.hybrid_parallel.zero.stage3 import ShardedParameters
from plugins.hybrid_parallel.zero.whole_parameters import assemble
from shardformer.distributed.process_groups import ProcessGroups, all_gather_json, message_group
from shardformer.shard_spec import ShardSpec, spec_of
from shardformer.utils.freed_memory import as_bytes


@dataclass
class Gather:
    """A gather in progress of one tensor to the first rank of its group."""

    local: Tensor  # shard of this rank
    spec: ShardSpec  # sharding of the tensor
    others: dict[int, Tensor] = field(default_factory=dict)  # on the first rank, the shards of the other ranks, by rank
    requests: list[Any] = field(default_factory=list)  # pending send and receive operations

    @staticmethod
    def begin(
        tensor: Tensor, dtype: torch.dtype | None, group: dist.ProcessGroup, spec: ShardSpec | None = None
    ) -> Gather:
        """Start to send this rank's shard, or to receive the other shards; all ranks of the group must call it.

        Args:
            tensor: parameter or buffer; it must not change before the gather has finished.
            dtype: target dtype of a floating-point tensor; None keeps its dtype.
            group: process group that shards the tensor.
            spec: sharding of the tensor; None for that of the parameter or buffer.
        """
        local, spec = tensor.detach(), spec or spec_of(tensor)
        if dtype is not None and local.is_floating_point():
            local = local.to(dtype)
        local = local.contiguous()
        gather = Gather(local, spec)
        if spec.dim is None:
            return gather
        group = open_for_messages(group, local.device)
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


@dataclass
class ReplicaGather:
    """A gather in progress of one parameter, of which replicas keep slices (ZeRO stage 3), to some of its holders.

    The slices are first sent to one of the replicas that share it, whose tensor-parallel ranks then gather the tensor.
    """

    local: Tensor | None  # on the ranks of that replica, memory for this rank's shard, flat; None on the others
    sent: Tensor  # this rank's slice, which is in memory until it has arrived
    spec: ShardSpec  # sharding of the tensor
    shape: torch.Size  # shape of this rank's shard
    group: dist.ProcessGroup  # process group that shards the tensor
    requests: list[Any]  # pending send and receive operations

    @staticmethod
    def begin(
        param: nn.Parameter,
        holder: ShardedParameters,
        dtype: torch.dtype | None,
        group: dist.ProcessGroup,
        destination: int,
    ) -> ReplicaGather:
        """Start to send this rank's slice, or to receive those of the others; all ranks that share it must call it.

        Args:
            param: the parameter.
            holder: what has this rank's slice of it.
            dtype: target dtype; None keeps its own.
            group: process group that shards the tensor.
            destination: rank of the replica that gathers, among those that share the parameter.
        """
        replicas, (start, stop, values) = holder.options.shard_group, holder.own_slice(param)
        values, local = values.to(dtype or values.dtype), None
        replicas = open_for_messages(replicas, values.device)
        if holder.rank == destination:
            local = values.new_empty(param.numel())
            local[start:stop] = values
            parts = {rank: holder.slice_on(rank, param) for rank in range(dist.get_world_size(replicas))}
            others = {rank: local[part.start : part.stop] for rank, part in parts.items() if rank != destination}
            requests = _batched(dist.irecv, others, replicas)
        else:
            requests = _batched(dist.isend, {destination: values}, replicas)
        return ReplicaGather(local, values, spec_of(param), param.shape, group, requests)

    def finish(self) -> Tensor | None:
        """Wait for the gather, and return the full tensor on the first rank of the replica, None on all others."""
        for request in self.requests:
            request.wait()
        if self.local is None:
            return None
        return Gather.begin(self.local.view(self.shape), None, self.group, self.spec).finish()


def open_for_messages(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return a group of the same ranks for messages; all ranks of the group must call this.

    NCCL makes its communicator here, if it has none. Batched messages use it, and then need only the ranks that
    exchange some. Messages that are not batched would make a further communicator, with buffers of its own, for each
    pair of ranks.
    """
    group = message_group(group)
    if device.type != "cpu":
        key = ("communicator", group.group_name)
        ProcessGroups.of_world().get_or_create(
            key, lambda: dist.all_reduce(torch.zeros((), device=device), group=group)
        )
    return group


def send(tensor: Tensor, to: int, group: dist.ProcessGroup) -> None:
    """Send a contiguous tensor to rank `to` of a group, which calls `receive`."""
    for request in _batched(dist.isend, {to: tensor}, group):
        request.wait()


def receive(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Fill `tensor` with the values that rank `source` of a group sends."""
    for request in _batched(dist.irecv, {source: tensor}, group):
        request.wait()


def _batched(operation: Callable[..., Any], tensors: Mapping[int, Tensor], group: dist.ProcessGroup) -> list[dist.Work]:
    """Start to send or to receive tensors; each belongs to the peer that is its key.

    As bytes, because no backend supports all dtypes. What is received must be dense in memory.
    """
    operations = [
        dist.P2POp(operation, as_bytes(tensor.view(-1)), group=group, group_peer=peer)
        for peer, tensor in tensors.items()
        if tensor.numel()
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def whole_state_dict(model: HybridParallelModel, mesh: HybridMesh) -> WholeState:
    """Return the whole model's parameters and persistent buffers by all of their names; all ranks call it.

    The tensors of tied names are the same one, as in the model that was given to `boost`.
    """
    mine: dict[str, Tensor] = {}
    for names, tensor in local_tensors(model, unique=True):
        full = assemble(tensor, tensor.detach(), mesh.group(spec_of(tensor).axis)).cpu()
        mine |= dict.fromkeys(names, full)
    return WholeState(mine if mesh.size("pp") == 1 else _of_all_stages(mine, mesh))


def _of_all_stages(mine: dict[str, Tensor], mesh: HybridMesh) -> dict[str, Tensor]:
    """Broadcast the tensors of each stage to the others; of those that several stages hold, the first one's."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in mine.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    described = [
        (names, str(mine[names[0]].dtype).removeprefix("torch."), list(mine[names[0]].shape))
        for names in by_tensor.values()
    ]
    group, whole = mesh.group("pp"), dict[str, Tensor]()
    for stage, tensors in enumerate(all_gather_json(described, group)):
        for names, dtype, shape in tensors:
            if names[0] in whole:
                continue
            value = torch.empty(shape, dtype=getattr(torch, dtype), device=mesh.device)
            if stage == mesh.rank("pp"):
                value.copy_(mine[names[0]])
            dist.broadcast(value, group=group, group_src=stage)
            whole |= dict.fromkeys(names, value.cpu())
    return whole
