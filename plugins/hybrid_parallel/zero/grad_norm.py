"""Norms of the gradients in buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plugins.hybrid_parallel.zero.bucket import Bucket
from shardformer.distributed.process_groups import world_group


def global_norm(buckets: Sequence[Bucket], device: torch.device) -> Tensor:
    """Return the norm of the gradients of all ranks (0-d, float64), each parameter counted once; see `sum_of_squares`.

    Must be called on all ranks.
    """
    total = sum_of_squares(buckets, device)
    if dist.get_world_size() > 1:
        dist.all_reduce(total, group=world_group())
    return total.sqrt()


def sum_of_squares(buckets: Sequence[Bucket], device: torch.device) -> Tensor:
    """Return the sum of squares of this rank's reduced gradients that are counted (0-d, float64).

    Gradients that are not counted still make it nan if they are not finite.
    """
    # A stage without trained parameters takes part on the mesh's device, too: each device has a backend of its own.
    if not buckets:
        return torch.zeros((), dtype=torch.float64, device=device)
    for bucket in buckets:
        bucket.clear_stale()
    # Not kept: user code may change the gradients in place.
    unknown = [bucket for bucket in buckets if bucket.used and bucket.norm is None]
    found = _norms(unknown)
    norms = {bucket: bucket.norm for bucket in buckets if bucket.used} | dict(zip(unknown, found, strict=True))
    zero = torch.zeros((), device=buckets[0].flat.device) if len(norms) < len(buckets) else None
    squares = torch.stack([norms.get(bucket, zero) for bucket in buckets]).double().square_()
    copies = [square for square, bucket in zip(squares.unbind(), buckets, strict=True) if not bucket.counted]
    if copies:
        torch._foreach_mul_(copies, 0.0)
    return squares.sum()


def _norms(buckets: Sequence[Bucket]) -> Sequence[Tensor]:
    """Return the norm of each bucket's reduced gradients; of offloaded ones, without having all in memory."""
    if not any(bucket.options.states.is_offloaded for bucket in buckets):
        return torch._foreach_norm([bucket.shard_grads for bucket in buckets]) if buckets else ()
    norms = []
    for bucket in buckets:
        norms += [norm.to(bucket.flat.device) for norm in torch._foreach_norm([bucket.shard_grads])]
        bucket.page_out_grads()
    return norms
