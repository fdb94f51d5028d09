"""Compute the persistent memory of a rank (parameters, gradients and optimizer states) from sizes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.planner.profile import LocalParameter, Profile
from plugins.hybrid_parallel.planner.stage_map import StageParts
from plugins.hybrid_parallel.zero.bucket_layout import places_in_bucket
from plugins.hybrid_parallel.zero.grouping import chunks_of

# AdamW has two moments per element, and a step counter per parameter.
_STATES, _STEP_BYTES = 2, 4


@dataclass(frozen=True)
class StaticMemory:
    """Bytes that one rank holds between two training steps.

    Attributes:
        parameters: parameters in the training dtype: flat buffers of the trained ones, plus the frozen ones.
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
    dp_size: int,
    dp_rank: int = 0,
    device_type: str = "cpu",
) -> StaticMemory:
    """Count the persistent bytes of a rank that holds `stages` and trains with AdamW.

    Args:
        stages: index of each stage of the rank -> its parts.
        profile: the profile for the layout's tensor-parallel size.
        config: the layout.
        dp_size: data-parallel size.
        dp_rank: data-parallel rank whose optimizer shard is counted.
        device_type: "cpu" or "cuda", on which the default size of buckets depends.
    """
    groups, frozen = _bucketed(stages, profile, config)
    num_shards = dp_size if config.zero.zero_stage else 1
    index = dp_rank if config.zero.zero_stage else 0
    parameters = masters = gradients = states = 0
    for members in groups:
        for chunk in chunks_of(members, config.zero.bucket_bytes(device_type)):
            sizes = [param.size for param in chunk]
            starts, total = places_in_bucket(sizes, num_shards, whole_parameters=False)
            shard = total // num_shards
            itemsize, grad_itemsize = chunk[0].itemsize, max(chunk[0].itemsize, 4)
            has_masters = config.mixed_precision.master_weights and grad_itemsize != itemsize
            ranges = [
                min(start + size, (index + 1) * shard) - max(start, index * shard)
                for start, size in zip(starts, sizes, strict=True)
            ]
            pieces = [size for size in ranges if size > 0]
            updated_itemsize = grad_itemsize if has_masters else itemsize
            parameters += total * itemsize
            masters += shard * grad_itemsize if has_masters else 0
            gradients += shard * grad_itemsize
            gradients += 0 if updated_itemsize == grad_itemsize else shard * updated_itemsize
            states += sum(pieces) * _STATES * updated_itemsize + len(pieces) * _STEP_BYTES
    return StaticMemory(parameters + frozen, masters, gradients, states, profile.buffer_bytes)


def updated_elements(stages: Mapping[int, StageParts], profile: Profile, config: HybridParallelConfig) -> int:
    """Count the trained elements of a rank that holds `stages`, before they are sharded over replicas."""
    groups, _ = _bucketed(stages, profile, config)
    return sum(param.size for members in groups for param in members)


def _bucketed(
    stages: Mapping[int, StageParts], profile: Profile, config: HybridParallelConfig
) -> tuple[list[Sequence[LocalParameter]], int]:
    """Group the trained parameters by bucket, in reverse order, and count the bytes of the frozen ones."""
    held: dict[tuple, LocalParameter] = {}
    for number, stage in sorted(stages.items()):
        for position, name in enumerate(stage.names):
            order, holders = stage.tied.get(position, (None, ()))
            ranks = {config.schedule.rank_of(each, config.parallel.pp_size) for each in holders}
            param = profile.parameters[name]
            # A tied parameter that several stages of this rank hold exists once; one that several ranks hold has a
            # bucket of its own.
            key = (order,) if order is not None else (None, number, position)
            held[key] = (param, order if len(ranks) > 1 else -1)
    groups: dict[tuple, list[LocalParameter]] = {}
    for param, order in reversed(held.values()):
        if param.trains:
            groups.setdefault((order, param.itemsize, param.kind), []).append(param)
    frozen = sum(param.size * param.itemsize for param, _ in held.values() if not param.trains)
    return list(groups.values()), frozen
