"""All-to-all sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509).

In every layer a rank holds a slice of the sequence and whole weights. An all-to-all before the attention kernel gives
each rank the whole sequence for a subset of the heads; an all-to-all after it reverses this.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from shardformer.distributed.collectives import all_to_all, pad_dim
from shardformer.sequence_parallel.split_gather import SequenceParallel


class UlyssesAllToAll:
    """All-to-all exchange around attention in one sequence-parallel region.

    Args:
        region: defines this rank's slice of the sequence.
    """

    def __init__(self, region: SequenceParallel) -> None:
        self.region = region

    def to_heads(self, *projections: Tensor) -> tuple[Tensor, ...]:
        """[batch, heads, seq/tp, head_dim] -> [batch, heads/tp, seq, head_dim], without padding.

        Key/value heads fewer than ranks are repeated, so that every rank gets one.
        """
        size, length = self.region.world_size, self.region.length
        repeated = (repeated_for(x, size) for x in projections)
        return tuple(all_to_all(x, 1, 2, self.region.group)[:, :, :length] for x in repeated)

    def own_heads(self, bias: Tensor | None, heads: int) -> Tensor | None:
        """Return the part of a bias [batch, all heads or 1, seq, seq] for this rank's `heads`."""
        if bias is None or bias.dim() < 4 or bias.shape[1] in (1, heads):
            return bias
        return bias.narrow(1, dist.get_rank(self.region.group) * heads, heads)

    def to_sequence(self, found: Tensor) -> Tensor:
        """Exchange attention output back: [batch, seq, heads/tp, head_dim] -> [batch, seq/tp, heads, head_dim]."""
        return all_to_all(pad_dim(found, 1, self.region.world_size), 1, 2, self.region.group)


def repeated_for(x: Tensor, size: int) -> Tensor:
    """Repeat heads of [batch, heads, ...] that are fewer than `size`, so that every rank gets one."""
    return x if x.shape[1] % size == 0 else x.repeat_interleave(size // x.shape[1], 1)
