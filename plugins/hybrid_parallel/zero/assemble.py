"""Assembly of whole tensors from their shards on a tensor-parallel axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from booster import failure
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.loss.arithmetic import unscaled
from plugins.hybrid_parallel.zero.bucket import Bucket
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


@failure.guard("optimizer.full_gradients")
def full_gradients(
    buckets: Sequence[Bucket], names: Mapping[nn.Parameter, str], mesh: HybridMesh, scale: float
) -> dict[str, Tensor]:
    """Return the whole, unscaled gradients of the parameters in buckets that have one, by name.

    Args:
        names: parameter -> its name.
        scale: factor that the gradients are multiplied by.
    """
    cut: dict[str, tuple[nn.Parameter, Tensor]] = {}
    for bucket in buckets:
        values = {piece.index: piece.view(bucket.shard_grads) for piece in bucket.pieces if bucket.used}
        for index, local in bucket.gather_pieces(values, bucket.grad_dtype).items():
            if index in bucket.used:
                param = bucket.params[index]
                cut[names[param]] = (param, unscaled(local, scale))
    # By name: tensor-parallel ranks sort their parameters into different buckets.
    return {
        name: assemble(param, local, mesh.group(spec_of(param).axis)) for name, (param, local) in sorted(cut.items())
    }
