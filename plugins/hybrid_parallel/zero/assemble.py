"""Assembly of a whole tensor from its shards on a tensor-parallel axis."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from shardformer.shard_spec import spec_of


def assemble(param: nn.Parameter, local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Assemble the full tensor, on every rank of the group, from the ranks' `local` shards, split like `param`."""
    spec = spec_of(param)
    if spec.dim is None:
        return local.clone()
    shapes = [spec.on_rank(rank).local_shape for rank in range(spec.world_size)]
    shards = [local.new_empty(shape) for shape in shapes]
    if len(set(shapes)) == 1:
        dist.all_gather(shards, local.contiguous(), group=group)
        return spec.assemble(shards)
    # An all-gather needs shards of one size: one broadcast each.
    for rank, shard in enumerate(shards):
        if rank == spec.rank:
            shard.copy_(local)
        dist.broadcast(shard, group=group, group_src=rank)
    return spec.assemble(shards)
