"""Blocks: a tensor-parallel axis that computes in a fixed number of blocks, whatever the number of its ranks.

Each weight of a tensor-parallel region is divided into blocks of heads or features, and a rank computes its blocks one
after the other. Every product then has the same shape on one rank as on many, and sums over blocks are added along one
binary tree: a rank adds up its own subtree, and the rest after an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardformer.shard_spec import ShardSpec

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _itself(parameter: Tensor) -> Tensor:
    return parameter


@dataclass(frozen=True)
class Blocks:
    """The blocks of one axis.

    Attributes:
        count: number of blocks on all ranks, a power of two.
        local: indices of the blocks of this rank.
        use: returns an alias of a parameter for one of several blocks that read it; code that adds up gradients exactly
            lets the gradient of each be a summand of its own.
        sequence_count: number of blocks that sequences are divided into between tensor-parallel regions.
    """

    count: int
    local: range
    use: Callable[[Tensor], Tensor] = _itself
    sequence_count: int = 1

    def slices(self, spec: ShardSpec) -> list[list[slice]]:
        """Return where each local block lies in this rank's shard: one slice of the sharded dim for each part."""
        return [self._slices_of(block, spec) for block in self.local]

    def _slices_of(self, block: int, spec: ShardSpec) -> list[slice]:
        units = spec.parts[0].size // spec.parts[0].unit
        wanted = replace(spec, rank=block, world_size=self.count, copies=max(1, self.count // units))
        found, position = [], 0
        for part, mine, own in zip(spec.parts, spec.pieces(), wanted.pieces(), strict=True):
            size = own[1] - own[0] + own[2]
            # Rows of padding have no place in the full tensor.
            first = (block - self.local[0]) * size if part.padded_size is not None else own[0] - mine[0]
            found.append(slice(position + first, position + first + size))
            position += mine[1] - mine[0] + mine[2]
        return found


# Weak keys: torch holds a process group until it is destroyed.
_BLOCKS_OF: WeakKeyDictionary[ProcessGroup, Blocks] = WeakKeyDictionary()


def compute_in_blocks(
    group: ProcessGroup, count: int, use: Callable[[Tensor], Tensor] = _itself, sequence_count: int = 1
) -> None:
    """Let layers on the axis `group` compute in `count` blocks; the group must not serve other models."""
    _BLOCKS_OF[group] = Blocks(count, own_blocks(count, group), use, sequence_count)


def own_blocks(count: int, group: ProcessGroup) -> range:
    """Return the indices of this rank's blocks."""
    share, rank = count // dist.get_world_size(group), dist.get_rank(group)
    return range(rank * share, (rank + 1) * share)


def blocks_of(group: ProcessGroup | None) -> Blocks | None:
    """Return the blocks of an axis; None if each rank computes its shard at once."""
    return None if group is None else _BLOCKS_OF.get(group)


def num_parts(group: ProcessGroup) -> int:
    """Return the number of parts that a layer is computed in: blocks, or ranks."""
    blocks = blocks_of(group)
    return dist.get_world_size(group) if blocks is None else blocks.count


def rank_of_draws(group: ProcessGroup) -> int:
    """Return the number that tells this rank's random numbers inside of a region from those of others.

    Blocks draw by their own index, see `BlockedTensor`.
    """
    return dist.get_rank(group) if blocks_of(group) is None else 0


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Add up 2**n tensors along a binary tree."""
    while len(parts) > 1:
        parts = [first + second for first, second in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def sum_over_blocks(parts: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """Return the sum of one tensor a block over all blocks of all ranks, in an order that the ranks do not change.

    Args:
        parts: of the local blocks.
    """
    local, size = tree_sum(parts), dist.get_world_size(group)
    if size == 1:
        return local
    local = local.contiguous()
    everyone = local.new_empty((size, *local.shape))
    all_gather_flat(everyone.view(-1), local.view(-1), group=group)
    return tree_sum(everyone.unbind())
