"""The buckets that training creates, and the frozen parameters that it leaves out of them, from sizes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.planner.profile import LocalParameter, Profile
from plugins.hybrid_parallel.planner.stage_map import StageParts
from plugins.hybrid_parallel.zero.bucket_layout import places_in_bucket
from plugins.hybrid_parallel.zero.grouping import chunks_of


@dataclass(frozen=True)
class Held:
    """Parameter on a rank."""

    param: LocalParameter  # its local shard
    place: int  # position in the model, from its first parameter on
    order: int  # index among the parameters that other ranks of the pipeline hold too; -1 if none does
    unit: tuple | None  # the module that gathers it under ZeRO stage 3; None if it stays whole
    is_repeated: bool  # whether several modules of this rank hold it, so that its gradient has several summands

    def numel(self) -> int:
        """Return the number of local elements."""
        return self.param.size


@dataclass(frozen=True)
class PlannedBucket:
    """Bucket of trained parameters."""

    members: Sequence[Held]  # its parameters, in the order of the backward pass
    starts: Sequence[int]  # the offset of each
    size: int  # elements, with the gaps
    unit: tuple | None  # the module that gathers it; None if its parameters stay whole
    num_shards: int  # number of ranks that share its states, and its parameters if they are gathered

    @property
    def axis(self) -> str:
        """Mesh axis over which its parameters are cut; experts have fewer replicas."""
        return self.members[0].param.axis

    @property
    def shard(self) -> int:
        """Elements of a rank's shard."""
        return self.size // self.num_shards

    @property
    def trained(self) -> int:
        """Elements without the gaps."""
        return sum(held.param.size for held in self.members)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the parameters."""
        return self.members[0].param.itemsize

    @property
    def grad_bytes(self) -> int:
        """Bytes of its whole gradients, in at least fp32."""
        return self.size * max(self.itemsize, 4)


@dataclass(frozen=True)
class RankParameters:
    """Parameters of a rank."""

    buckets: Sequence[PlannedBucket]  # those that are trained, in the order in which they are reduced
    frozen_whole: int  # bytes of the frozen ones that stay whole
    frozen_units: Sequence[PlannedBucket]  # the frozen ones that modules gather

    @property
    def gathered(self) -> list[PlannedBucket]:
        """All that modules gather."""
        return [*self.frozen_units, *(bucket for bucket in self.buckets if bucket.unit is not None)]

    def units(self, axis: str | None = None) -> dict[tuple, int]:
        """Return module -> bytes of the parameters that it gathers (over an axis), in the order of the model."""
        found: dict[tuple, int] = {}
        for bucket in self.gathered:
            if axis in (None, bucket.axis):
                found[bucket.unit] = found.get(bucket.unit, 0) + bucket.size * bucket.itemsize
        return dict(sorted(found.items()))

    def unit_shards(self) -> dict[tuple, int]:
        """Return module -> bytes of this rank's shards of these."""
        found: dict[tuple, int] = {}
        for bucket in self.gathered:
            found[bucket.unit] = found.get(bucket.unit, 0) + bucket.shard * bucket.itemsize
        return found


def plan_buckets(
    stages: Mapping[int, StageParts],
    profile: Profile,
    config: HybridParallelConfig,
    num_shards: Mapping[str, int],
    device_type: str = "cpu",
) -> RankParameters:
    """Sort the parameters of a rank into buckets as `build_buckets` does.

    Args:
        stages: index of each stage of the rank -> its parts.
        profile: the profile for the layout's tensor-parallel size.
        num_shards: number of ranks that share the optimizer states, by axis; see `Layout.shards`.
        device_type: "cpu" or "cuda", on which the default size of buckets depends.
    """
    has_file = config.offload.offload_parameters is not None

    def bucket_of(members: Sequence[Held]) -> PlannedBucket:
        shards = num_shards[members[0].param.axis]
        starts, size = places_in_bucket([each.param.size for each in members], shards, False)
        return PlannedBucket(members, starts, size, members[0].unit if shards > 1 or has_file else None, shards)

    kinds: dict[tuple, list[Held]] = {}
    frozen: dict[tuple, list[Held]] = {}
    frozen_whole = 0
    for each in reversed(_held(stages, profile, config)):
        if each.param.trains:
            kinds.setdefault((each.order, each.param.itemsize, each.param.kind, each.unit), []).append(each)
        elif each.unit is not None and (num_shards[each.param.axis] > 1 or has_file):
            frozen.setdefault((each.unit, each.param.itemsize, each.param.axis), []).append(each)
        else:
            frozen_whole += each.param.bytes
    limit = config.zero.bucket_bytes(device_type)
    buckets = [bucket_of(chunk) for members in kinds.values() for chunk in chunks_of(members, limit)]
    return RankParameters(
        sorted(buckets, key=lambda each: (each.members[0].order, -min(member.place for member in each.members))),
        frozen_whole,
        [bucket_of(members) for members in frozen.values()],
    )


def _held(stages: Mapping[int, StageParts], profile: Profile, config: HybridParallelConfig) -> list[Held]:
    """Return the parameters of a rank in the order of the model."""
    found: dict[tuple, Held] = {}
    for number, stage in sorted(stages.items()):
        for position, name in enumerate(stage.names):
            order, holders = stage.tied.get(position, (None, ()))
            ranks = {config.schedule.rank_of(each, config.parallel.pp_size) for each in holders}
            param = profile.parameters[name]
            # A tied parameter that several stages of this rank hold exists once; one that several ranks hold has a
            # bucket of its own.
            key = (order,) if order is not None else (None, number, position)
            again = found.get(key)
            unit = (number, stage.owners[position]) if config.zero.zero_stage == 3 and param.is_sharded else None
            found[key] = Held(
                param,
                len(found) if again is None else again.place,
                order if len(ranks) > 1 else -1,
                unit if again is None else again.unit,
                position in stage.repeated or again is not None,
            )
    return list(found.values())
