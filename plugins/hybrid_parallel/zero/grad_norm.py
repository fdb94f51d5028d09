"""Norms of the gradients in buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plugins.hybrid_parallel.loss.arithmetic import norm_of
from plugins.hybrid_parallel.zero.bucket import Bucket
from shardformer.distributed.process_groups import world_group


def global_norm(buckets: Sequence[Bucket], device: torch.device, norm_type: float = 2.0) -> Tensor:
    """Return the norm of the gradients of all ranks (0-d, float64), each parameter counted once; see `norm_of_rank`.

    Must be called on all ranks.
    """
    norm = norm_of_rank(buckets, device, norm_type)
    if dist.get_world_size() == 1:
        return norm
    if norm_type < math.inf:
        total = norm.pow(norm_type)
        dist.all_reduce(total, group=world_group())
        return total.pow(1.0 / norm_type)
    # The maximum of nan and a number is either, depending on the backend.
    largest = torch.stack([norm.nan_to_num(nan=math.inf, posinf=math.inf), norm.isnan().double()])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=world_group())
    norm, is_nan = largest.unbind()
    return norm.masked_fill(is_nan > 0, math.nan)


def norm_of_rank(buckets: Sequence[Bucket], device: torch.device, norm_type: float = 2.0) -> Tensor:
    """Return the norm of this rank's reduced gradients that are counted (0-d, float64).

    Gradients that are not counted still make it nan if they are not finite.
    """
    # A stage without trained parameters takes part on the mesh's device, too: each device has a backend of its own.
    if not buckets:
        return torch.zeros((), dtype=torch.float64, device=device)
    for bucket in buckets:
        bucket.clear_stale()
    # Not kept: user code may change the gradients in place.
    used = [bucket for bucket in buckets if bucket.used]
    known = {bucket: bucket.norm for bucket in used if bucket.norm is not None and norm_type == 2.0}
    unknown = [bucket for bucket in used if bucket not in known]
    norms = known | dict(zip(unknown, _norms(unknown, norm_type), strict=True))
    zero = torch.zeros((), dtype=torch.float64, device=buckets[0].flat.device) if len(norms) < len(buckets) else None
    together = torch.stack([norms.get(bucket, zero) for bucket in buckets])
    copies = [norm for norm, bucket in zip(together.unbind(), buckets, strict=True) if not bucket.counted]
    if copies:
        torch._foreach_mul_(copies, 0.0)
    return torch.linalg.vector_norm(together, norm_type)


def _norms(buckets: Sequence[Bucket], norm_type: float) -> Sequence[Tensor]:
    """Return the norm of each bucket's reduced gradients; of offloaded ones, without having all in memory."""
    if buckets and all(bucket.shard_grads.device.type != "cpu" for bucket in buckets):
        return torch._foreach_norm([bucket.shard_grads for bucket in buckets], norm_type, torch.float64)
    norms = []
    for bucket in buckets:
        norms.append(norm_of(bucket.shard_grads, norm_type).to(bucket.flat.device))
        bucket.page_out_grads()
    return norms
