"""The whole tensor from the pieces of a tensor-parallel axis."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from shardformer.shard_spec import spec_of


def assemble(param: nn.Parameter, local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The full tensor of which `local` is this rank's piece, cut like `param`; on every rank of the axis."""
    spec = spec_of(param)
    if spec.dim is None:
        return local.clone()
    shapes = [spec.on_rank(rank).local_shape for rank in range(spec.world_size)]
    shards = [local.new_empty(shape) for shape in shapes]
    # Pieces may differ in size: one broadcast each.
    for rank, shard in enumerate(shards):
        if rank == spec.rank:
            shard.copy_(local)
        dist.broadcast(shard, group=group, group_src=rank)
    return spec.assemble(shards)
