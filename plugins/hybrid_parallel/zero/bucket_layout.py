"""Layout of a bucket's flat memory: offsets of the parameters, and the shard of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plugins.hybrid_parallel.zero.comm.collectives import ZeroCollectives
from plugins.hybrid_parallel.zero.grad_buffer_pool import GradBufferPool
from shardformer.shard_spec import pad_to_multiple

# Parameters and shards start at multiples of this many elements: kernels are slower on data that starts in the middle
# of a cache line (docs/levers.md).
_ALIGNMENT = 16


@dataclass(frozen=True)
class BucketOptions:
    """Options that the buckets of one optimizer share.

    Attributes:
        dp_group: the ranks that hold the same shards of these parameters and see other tokens.
        zero_stage: 0 or 1.
        master_weights: whether 16-bit parameters get fp32 copies for the optimizer.
        whole_parameters: whether the optimizer needs whole parameters (Adafactor, Muon).
        bucket_bytes: upper limit of a bucket's gradients, in bytes.
        exchange: the collectives that move shards of gradients and parameters between ranks.
        grad_buffers: the pool from which the buckets take buffers of gradients that they shard.
        keeps_local: whether local gradients are kept until the step is known to be finite, for reports on nan and inf.
            Where ranks learn that before, as between CPUs, only those of a bad step are kept.
        hidden_by: the options under which no rank has whole gradients as in plain torch; None if every rank has them.
    """

    dp_group: ProcessGroup
    zero_stage: int
    master_weights: bool
    whole_parameters: bool
    bucket_bytes: int
    exchange: ZeroCollectives
    grad_buffers: GradBufferPool
    keeps_local: bool = True
    hidden_by: str | None = None

    @property
    def num_shards(self) -> int:
        """Number of shards that a bucket is divided into: 1 under ZeRO stage 0."""
        return dist.get_world_size(self.dp_group) if self.zero_stage else 1

    @property
    def counts(self) -> bool:
        """Whether the global norm counts this rank's gradients; under stage 0 only one of the copies is counted."""
        return self.zero_stage == 1 or dist.get_rank(self.dp_group) == 0

    @property
    def shard_index(self) -> int:
        """Index of this rank's shard: 0 under ZeRO stage 0."""
        return dist.get_rank(self.dp_group) if self.zero_stage else 0


@dataclass(frozen=True, eq=False)
class BucketSlice:
    """The part of one parameter that is in this rank's shard.

    Attributes:
        index: the parameter's position in its bucket.
        start, stop: range in the flattened parameter.
        offset: start of the piece in the shard.
        parameter: the tensor that the optimizer updates; fp32 if there are master weights.
    """

    index: int
    start: int
    stop: int
    offset: int
    parameter: nn.Parameter

    def view(self, shard: Tensor) -> Tensor:
        """Return the piece's range of a flat tensor over the shard."""
        return shard[self.offset : self.offset + self.stop - self.start]


class HoldsPieces(Protocol):
    """A bucket, or another holder of what an optimizer updates, as code that handles states sees it."""

    group_index: int

    @property
    def params(self) -> Sequence[nn.Parameter]:
        """The parameters."""

    @property
    def pieces(self) -> Sequence[BucketSlice]:
        """The parts of them on this rank."""


def places_in_bucket(sizes: Sequence[int], num_shards: int, whole_parameters: bool) -> tuple[list[int], int]:
    """Return the offset of each parameter in the flat buffer, and the buffer's size, divisible by `num_shards`."""
    if not whole_parameters or num_shards == 1:
        padded = [pad_to_multiple(size, _ALIGNMENT) for size in sizes]
        offsets = [sum(padded[:index]) for index in range(len(sizes))]
        return offsets, pad_to_multiple(sum(padded), num_shards * _ALIGNMENT)
    # Whole parameters are distributed, the largest first to the emptiest shard; shards are padded to the fullest.
    loads, places = [0] * num_shards, [(0, 0)] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        shard = loads.index(min(loads))
        places[index] = (shard, loads[shard])
        loads[shard] += pad_to_multiple(sizes[index], _ALIGNMENT)
    shard_size = pad_to_multiple(max(loads), _ALIGNMENT)
    return [shard * shard_size + start for shard, start in places], shard_size * num_shards


def gaps_between(offsets: Sequence[int], sizes: Sequence[int], total: int) -> list[tuple[int, int]]:
    """Return the ranges of a flat buffer that belong to no parameter."""
    gaps, end = [], 0
    for offset, size in sorted(zip(offsets, sizes, strict=True)):
        if offset > end:
            gaps.append((end, offset))
        end = offset + size
    return gaps if end == total else [*gaps, (end, total)]
