"""Compute the persistent memory of a rank (parameters, gradients and optimizer states) from sizes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.planner.planned_buckets import RankParameters, plan_buckets
from plugins.hybrid_parallel.planner.profile import Profile
from plugins.hybrid_parallel.planner.stage_map import StageParts

# AdamW has two moments per element, and a step counter per parameter.
_STATES, _STEP_BYTES = 2, 4


@dataclass(frozen=True)
class StaticMemory:
    """Bytes that one rank holds between two training steps.

    Attributes:
        parameters: parameters in the training dtype: flat buffers of the trained ones, plus the frozen ones; under ZeRO
            stage 3 the shards of those that are gathered.
        masters: fp32 master weights of 16-bit parameters.
        gradients: accumulated and reduced gradients.
        states: optimizer states.
        buffers: buffers of the model.
    """

    parameters: int
    masters: int
    gradients: int
    states: int
    buffers: int

    @property
    def total(self) -> int:
        """Sum of all parts, in bytes."""
        return self.parameters + self.masters + self.gradients + self.states + self.buffers


def count_static(
    stages: Mapping[int, StageParts],
    profile: Profile,
    config: HybridParallelConfig,
    num_replicas: int,
    replica: int = 0,
    device_type: str = "cpu",
) -> StaticMemory:
    """Count the persistent bytes of a rank that holds `stages` and trains with AdamW.

    Args:
        stages: index of each stage of the rank -> its parts.
        profile: the profile for the layout's tensor-parallel size.
        config: the layout.
        num_replicas: data-parallel times context-parallel ranks.
        replica: position among them of the rank that is counted.
        device_type: "cpu" or "cuda", on which the default size of buckets depends.

    Raises:
        ConfigurationError: `zero_size` does not divide the replicas.
    """
    num_shards = config.zero.num_shards(num_replicas)
    return static_of(plan_buckets(stages, profile, config, num_shards, device_type), profile, config, replica)


def static_of(held: RankParameters, profile: Profile, config: HybridParallelConfig, replica: int = 0) -> StaticMemory:
    """Count the persistent bytes of a rank, given its buckets; see `count_static`."""
    num_shards = held.num_shards
    index = replica % num_shards  # neighbours share the states
    parameters = held.frozen_whole + sum(size // num_shards for size in held.frozen_units.values())
    masters = gradients = states = 0
    for bucket in held.buckets:
        shard, itemsize = bucket.size // num_shards, bucket.itemsize
        grad_itemsize = max(itemsize, 4)
        has_masters = config.mixed_precision.master_weights and grad_itemsize != itemsize
        ranges = [
            min(start + each.param.size, (index + 1) * shard) - max(start, index * shard)
            for start, each in zip(bucket.starts, bucket.members, strict=True)
        ]
        pieces = [size for size in ranges if size > 0]
        updated_itemsize = grad_itemsize if has_masters else itemsize
        parameters += (bucket.size if bucket.unit is None else shard) * itemsize
        masters += shard * grad_itemsize if has_masters else 0
        gradients += shard * grad_itemsize
        gradients += 0 if updated_itemsize == grad_itemsize else shard * updated_itemsize
        states += sum(pieces) * _STATES * updated_itemsize + len(pieces) * _STEP_BYTES
    return StaticMemory(parameters, masters, gradients, states, profile.buffer_bytes)
