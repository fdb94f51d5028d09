"""Fused query/key/value projection with fewer key/value heads than ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.distributed.collectives import copy_to_region
from shardformer.layers.parallel_module import ParallelModule
from shardformer.matmul.weight_grad import MatmulLayer
from shardformer.sequence_parallel.split_gather import PendingGather
from shardformer.shard_spec import ShardSpec, annotate


class MultiQueryLinear(ParallelModule, MatmulLayer):
    """Fused projection [query heads, keys, values] with fewer key/value heads than ranks.

    Input: [..., in_features], the same on every rank. Output: [..., (local query heads + 2) * head_dim]. The weight
    stays whole on every rank. Each rank computes with the rows of its query heads and of the key and value head that
    they share, so its gradient is a partial sum.
    """

    shards_layer = True

    def __init__(
        self,
        native: nn.Linear,
        group: ProcessGroup,
        sizes: tuple[int, int, int],
        input_is_gathered: bool,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.group = native.weight, native.bias, group
        self.input_is_gathered = input_is_gathered
        num_heads, num_groups, head_dim = sizes
        rank, world_size = (dist.get_rank(group), dist.get_world_size(group))
        local = num_heads // world_size
        kv_head = rank * num_groups // world_size
        starts = (rank * local, num_heads + kv_head, num_heads + num_groups + kv_head)
        counts = (local, 1, 1)
        self.rows = [
            slice(start * head_dim, (start + count) * head_dim) for start, count in zip(starts, counts, strict=True)
        ]
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                annotate(parameter, ShardSpec(tuple(parameter.shape), rank=rank, world_size=world_size), group)

    @staticmethod
    def from_native_module(
        module: nn.Module,
        process_group: ProcessGroup,
        *,
        num_heads: int,
        num_groups: int = 1,
        head_dim: int,
        input_is_gathered: bool = False,
    ) -> MultiQueryLinear:
        """Convert a fused projection of `num_heads` query and `num_groups` key and value heads of `head_dim`."""
        return MultiQueryLinear(module, process_group, (num_heads, num_groups, head_dim), input_is_gathered)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [batch, seq, hidden] -> [batch, seq, features of this rank]."""
        weight = torch.cat([self.weight[rows] for rows in self.rows])
        bias = None if self.bias is None else torch.cat([self.bias[rows] for rows in self.rows])
        pending = PendingGather.of(x)
        if pending is not None:  # no overlap for this rare layer
            x = pending.tokens()
        return self.linear(x if self.input_is_gathered else copy_to_region(x, self.group), weight, bias)
