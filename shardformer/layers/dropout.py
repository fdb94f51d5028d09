"""Dropout with a random stream shared over the tensor-parallel axis, or with one stream per rank."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.distributed.blocks import rank_of_draws
from shardformer.distributed.random import in_parallel_region
from shardformer.layers.parallel_module import ParallelModule


class SharedDropout(ParallelModule):
    """Dropout on replicated activations: the same mask on every rank.

    The default stream of a forward pass is the shared one, so this is plain dropout under an explicit name.
    """

    can_stay_whole = True

    def __init__(self, p: float, inplace: bool = False) -> None:
        super().__init__()
        self.p, self.inplace = p, inplace

    @staticmethod
    def from_native_module(module: nn.Module, process_group: ProcessGroup) -> SharedDropout:
        """Create the layer from `nn.Dropout`."""
        return SharedDropout(module.p, module.inplace)

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of `x`, [batch, seq, hidden]."""
        return F.dropout(x, self.p, self.training, self.inplace)

    def extra_repr(self) -> str:
        """Describe the layer for `repr`."""
        return f"p={self.p}"


class ParallelDropout(ParallelModule):
    """Dropout on sharded activations (heads, or a slice of the sequence): each rank draws its own mask."""

    def __init__(self, p: float, rank: int, inplace: bool = False) -> None:
        super().__init__()
        self.p, self.rank, self.inplace = p, rank, inplace

    @staticmethod
    def from_native_module(module: nn.Module, process_group: ProcessGroup) -> ParallelDropout:
        """Create the layer from `nn.Dropout`."""
        return ParallelDropout(module.p, rank_of_draws(process_group), module.inplace)

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of `x`, [batch, seq, hidden]."""
        if not self.training or self.p == 0.0:
            return x
        return in_parallel_region(self.rank, F.dropout, x, self.p, True, self.inplace)

    def extra_repr(self) -> str:
        """Describe the layer for `repr`."""
        return f"p={self.p}, rank={self.rank}"
