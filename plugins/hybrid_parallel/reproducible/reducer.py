"""ExactReducer: reduces the gradients of exact buckets."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.reproducible.bucket import ExactBucket
from plugins.hybrid_parallel.reproducible.exact_sums import LIMIT, NUM_PARTS, largest, norm_of_parts, power_parts
from plugins.hybrid_parallel.zero.reducer import GradientReducer
from shardformer.distributed.process_groups import world_group


class ExactReducer(GradientReducer):
    """Reducer that refuses sums beyond the range of the grid, and computes the global norm exactly."""

    buckets: list[ExactBucket]

    def finish(self, factor: Tensor | None = None) -> None:
        """Reduce the remaining buckets; see `GradientReducer.finish`.

        Raises:
            ConfigurationError: if gradients are too large for exact sums; raised on all ranks.
        """
        self.launch_rest()
        bounds = torch.stack([bucket.bound for bucket in self.buckets]) if self.buckets else torch.zeros(0)
        if dist.get_world_size(self.dp_group) > 1:
            dist.all_reduce(bounds, group=self.dp_group)
        for bucket, bound in zip(self.buckets, bounds.unbind(), strict=True):
            bucket.bound.copy_(bound)
            for group in bucket.sum_groups:
                dist.all_reduce(bucket.bound, group=group)
        most = max((float(bucket.bound) for bucket in self.buckets if bucket.bound.isfinite()), default=0.0)
        if dist.get_world_size() > 1:  # other shards may have smaller gradients
            everywhere = torch.tensor(most, dtype=torch.float64)
            dist.all_reduce(everywhere, op=dist.ReduceOp.MAX, group=world_group())
            most = float(everywhere)
        if most >= LIMIT:
            raise ConfigurationError(
                f"reproducible=True adds up gradients below {LIMIT:g}, and the largest ones of this step add up to "
                f"{most:g}; divide the loss, or use reproducible=False"
            )
        super().finish(factor)

    def global_norm(self, device: torch.device, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the gradients of all ranks, from the exact sum of their squares, or other powers.

        Raises:
            ConfigurationError: if user code has set gradients beyond the range of exact sums, or for a power that is.
        """
        if norm_type == math.inf:  # nothing is added up
            return super().global_norm(device, norm_type)
        if norm_type > 2.0:
            raise ConfigurationError(
                f"reproducible=True adds up squares of gradients or lower powers, and norm_type={norm_type:g}; use 2 "
                "or less, inf, or reproducible=False"
            )
        parts = torch.zeros(NUM_PARTS + 2, dtype=torch.int64, device=device)
        for bucket in self.buckets:
            bucket.clear_stale()
            most = largest(bucket.shard_grads) if bucket.used else parts.new_zeros(())
            if not torch.isfinite(most):
                parts[NUM_PARTS] += 1
            elif most >= LIMIT:
                parts[NUM_PARTS + 1] += 1
            elif bucket.used and bucket.counted:
                parts[:NUM_PARTS] += power_parts(bucket.shard_grads, norm_type)
        if dist.get_world_size() > 1:
            dist.all_reduce(parts, group=world_group())
        *powers, nonfinite, beyond = parts.tolist()
        if beyond:
            raise ConfigurationError(
                f"reproducible=True adds up gradients below {LIMIT:g}, and one was set to more; set smaller ones, or "
                "use reproducible=False"
            )
        norm = torch.nan if nonfinite else norm_of_parts(powers, norm_type)
        return torch.tensor(norm, dtype=torch.float64, device=device)
