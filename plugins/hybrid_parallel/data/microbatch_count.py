"""Number of micro-batches of a batch, where ranks must agree on it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh

MANY = 2**62  # more samples than any batch has


def agreed_microbatches(rows: int, count: Callable[[int, int], int], mesh: HybridMesh) -> int:
    """Agree on one number of micro-batches, since ranks wait for one another at the experts of every layer.

    Every share of the batch that is not empty has at least that many samples.

    Args:
        rows: samples of this rank's share of the batch.
        count: (samples, stages) -> number of micro-batches that one rank alone would use.
        mesh: mesh of ranks.
    """
    # On the CPU: reading the result must not wait for the device.
    extremes = torch.tensor([rows or MANY, -rows])
    dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=mesh.group(DP_CP))
    fewest, most = int(extremes[0]), -int(extremes[1])
    return min(count(most, mesh.size("pp")), fewest) if most else 0
