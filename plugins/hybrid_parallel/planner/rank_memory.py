"""Compute the memory of a rank at its fullest moment: what it keeps, and what the passes and the update add."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Action, Kind
from plugins.hybrid_parallel.planner.costs import Memory, StageCost
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.profile import LocalParameter, Profile
from plugins.hybrid_parallel.planner.stage_map import StageParts
from plugins.hybrid_parallel.setup.optimizer import chunks_of
from plugins.hybrid_parallel.zero.bucket_layout import places_in_bucket
from plugins.hybrid_parallel.zero.reducer import IN_FLIGHT, KEPT_BUFFERS
from shardformer.shard_spec import EXPERTS


@dataclass(frozen=True)
class Held:
    """Parameter on a rank."""

    param: LocalParameter  # its local shard
    place: int  # position in the model, from its first parameter on
    order: int  # index among the parameters that other ranks of the pipeline hold too; -1 if none does
    # under ZeRO stage 3 (stage, module that gathers it, whether in 8 bit); None if it stays whole
    unit: tuple[int, int, bool] | None
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
    unit: tuple[int, int, bool] | None  # see `Held`
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
                itemsize = 1 if bucket.unit[2] else bucket.itemsize
                found[bucket.unit] = found.get(bucket.unit, 0) + bucket.size * itemsize
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
    reads_16_bit = config.kernels.compile_layers or config.offload.offload_parameters is not None
    for number, stage in sorted(stages.items()):
        for position, name in enumerate(stage.names):
            order, holders = stage.tied.get(position, (None, ()))
            ranks = {config.schedule.rank_of(each, config.parallel.pp_size) for each in holders}
            param = profile.parameters[name]
            # A tied parameter that several stages of this rank hold exists once; one that several ranks hold has a
            # bucket of its own.
            key = (order,) if order is not None else (None, number, position)
            again = found.get(key)
            unit = None
            if config.zero.zero_stage == 3 and param.is_sharded:
                unit = number, stage.owners[position], param.is_8_bit and not reads_16_bit
            found[key] = Held(
                param,
                len(found) if again is None else again.place,
                order if len(ranks) > 1 else -1,
                unit if again is None else again.unit,
                position in stage.repeated or again is not None,
            )
    return list(found.values())


@dataclass
class _Pool:
    """Bytes of the buffers of a `GradBufferPool`, whose pages are in memory once a bucket has written them.

    Any bucket may get any buffer that is large enough, so that sooner or later the largest of them has been in it.
    """

    sizes: Sequence[int]  # bytes of the gradients of each bucket
    unit: int  # minimum bytes of a buffer
    free: list[int] = field(default_factory=list)  # bytes of the free buffers
    taken: dict[int, int] = field(default_factory=dict)  # bucket -> bytes of its buffer
    peak: int = 0  # the most bytes in memory at once

    def take(self, number: int) -> None:
        """Take the smallest buffer that is large enough for a bucket, or a new one."""
        fits = [each for each in self.free if each >= self.sizes[number]]
        if fits:
            self.free.remove(min(fits))
        self.taken[number] = min(fits, default=max(self.sizes[number], self.unit))
        self.peak = max(self.peak, sum(map(self.written, (*self.free, *self.taken.values()))))

    def give(self, number: int) -> None:
        """Give the buffer of a bucket back."""
        self.free.append(self.taken.pop(number))

    def written(self, buffer: int) -> int:
        """Return the bytes of a buffer that are in memory."""
        return max((size for size in self.sizes if size <= buffer), default=0)


def grad_buffer_bytes(held: RankParameters, layout: Layout, device_type: str) -> int:
    """Return the bytes beyond the rank's shard of gradients that a step needs for gradients.

    On a CPU a rank reduces buckets while the backward pass computes the next ones, and reuses their memory, unless it
    must not wait for other ranks there. On a GPU all gradients of a pass stay until it ends.

    Args:
        device_type: "cpu" or "cuda".
    """
    buckets = [bucket for bucket in held.buckets if bucket.num_shards > 1]  # of the others, a rank keeps all
    if not buckets:
        return 0
    zero_stage, num_passes = layout.zero_stage, layout.num_microbatches
    in_flight = sum(bucket.grad_bytes for bucket in buckets)
    if device_type == "cpu":
        waits = layout.pp_size == layout.cp_size == 1
        pool = _Pool([bucket.grad_bytes for bucket in buckets], layout.config.zero.bucket_bytes(device_type))
        in_flight = _in_flight(buckets, pool, waits and (zero_stage >= 2 or num_passes == 1))
        # Ranks that do not own the copies of a parameter have a bucket of their own for them.
        in_flight += pool.written(pool.unit) if layout.tp_size > 1 else 0
    # From the second pass on, its reduced shards are there in addition to the sum of those before.
    summands = sum(bucket.grad_bytes // bucket.num_shards for bucket in buckets)
    return in_flight + (summands if zero_stage >= 2 and num_passes > 1 else 0)


def _in_flight(buckets: Sequence[PlannedBucket], pool: _Pool, reduces_early: bool) -> int:
    """Run the reducer's order of launches and releases over two passes; see `GradientReducer._launch_next`."""
    for _ in range(2):
        missing = [len(bucket.members) for bucket in buckets]
        launched = 0
        for number, is_last in _arrivals(buckets):
            if number not in pool.taken:
                pool.take(number)
            missing[number] -= is_last
            while reduces_early and launched < len(buckets) and missing[launched] == 0:
                launched = _launch(pool, launched)
        while launched < len(buckets):
            if launched not in pool.taken:  # no gradient has reached it
                pool.take(launched)
            launched = _launch(pool, launched) if reduces_early else launched + 1
        for number in sorted(pool.taken):
            pool.give(number)
        pool.free = sorted(pool.free, reverse=True)[: KEPT_BUFFERS if reduces_early else None]
    return pool.peak


def _launch(pool: _Pool, number: int) -> int:
    earlier = number - IN_FLIGHT
    if earlier > 0 and earlier - 1 in pool.taken:
        pool.give(earlier - 1)
    return number + 1


def _arrivals(buckets: Sequence[PlannedBucket]) -> Iterator[tuple[int, bool]]:
    """Yield (bucket, whether it is the parameter's last) of each gradient; the last parameters come first.

    A parameter that several modules hold has its first gradient at once, from the head, and its last at its own place.
    """
    places = [(held.place, number) for number, bucket in enumerate(buckets) for held in bucket.members]
    for number, bucket in enumerate(buckets):
        if any(held.is_repeated for held in bucket.members):
            yield number, False
    for _, number in sorted(places, reverse=True):
        yield number, True


# AdamW has two moments per element, and a step counter per parameter.
_STATES, _STEP_BYTES = 2, 4


@dataclass(frozen=True)
class StaticMemory:
    """Bytes that one rank holds between two training steps."""

    # parameters in the training dtype: flat buffers of the trained ones, plus the frozen ones; under ZeRO stage 3 the
    # shards of those that are gathered
    parameters: int
    masters: int  # fp32 master weights of 16-bit parameters
    gradients: int  # accumulated and reduced gradients
    states: int
    buffers: int  # buffers of the model

    @property
    def total(self) -> int:
        """Sum of all parts, in bytes."""
        return self.parameters + self.masters + self.gradients + self.states + self.buffers


def static_of(held: RankParameters, profile: Profile, config: HybridParallelConfig, replica: int = 0) -> StaticMemory:
    """Count a rank's persistent bytes with AdamW; `replica`: its place among replicas and context ranks."""
    parameters = held.frozen_whole + sum(bucket.shard * bucket.itemsize for bucket in held.frozen_units)
    masters = gradients = states = 0
    for bucket in held.buckets:
        shard, itemsize = bucket.shard, bucket.itemsize
        # Neighbours share the states: of experts, the neighbours that have the same ones.
        index = replica // (config.parallel.ep_size if bucket.axis == EXPERTS else 1) % bucket.num_shards
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


# Units of parameters at once: the one whose gradients are computed, the next one, and where gathers proceed while the
# rank computes, the one after that.
_UNITS_AT_ONCE = {"cpu": 2, "cuda": 3}


@dataclass(frozen=True)
class RankStates:
    """What a rank keeps over a step, whatever its micro-batches."""

    held: RankParameters  # its parameters, in buckets
    static: StaticMemory  # bytes of parameters, gradients and optimizer states
    layout: Layout
    device_type: str  # "cpu" or "cuda"

    @cached_property
    def gathered(self) -> int:
        """Bytes of the parameters that are whole at once under ZeRO stage 3: those of neighbouring units."""
        units, count = list(self.held.units().values()), _UNITS_AT_ONCE[self.device_type]
        return max((sum(units[start : start + count]) for start in range(len(units))), default=0)

    @cached_property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shards of these parameters."""
        return sum(self.held.unit_shards().values())

    @cached_property
    def shard_in_use(self) -> int:
        """Bytes of a shard of parameters in a file that is in memory while a CPU gathers them."""
        is_in_file = self.device_type == "cpu" and self.layout.offload_parameters is not None
        return max(self.held.unit_shards().values(), default=0) if is_in_file else 0

    @cached_property
    def gradients(self) -> int:
        """Bytes of whole gradients and of summands that exist beyond this rank's shard."""
        return grad_buffer_bytes(self.held, self.layout, self.device_type)

    @cached_property
    def update(self) -> int:
        """Bytes that AdamW takes for intermediate results.

        On a CPU it updates one piece after the other, with two tensors of its size. On a GPU its multi-tensor form has
        one tensor for every piece at once.
        """
        if self.device_type != "cpu":
            return sum(bucket.shard for bucket in self.held.buckets) * 4
        largest = (
            min(each.param.size, bucket.shard) * max(each.param.itemsize, 4)
            for bucket in self.held.buckets
            for each in bucket.members
        )
        return 2 * max(largest, default=0)

    @cached_property
    def largest_bucket(self) -> int:
        """Bytes of gradients, masters and states of the bucket that has most of them on this rank."""
        elements = max((bucket.shard for bucket in self.held.buckets), default=0)
        sixteen_bit = any(bucket.itemsize < 4 for bucket in self.held.buckets)
        return elements * (16 if sixteen_bit and self.layout.config.mixed_precision.master_weights else 12)


def memory_of_rank(states: RankStates, own: Sequence[int], costs: Sequence[StageCost], alive: set[tuple]) -> Memory:
    """Return the memory of a rank that holds the stages `own`; `alive`: see `peak_activations`."""
    layout, static = states.layout, states.static
    saved, off = activations(layout, own, costs, alive)
    passes = max(max(costs[stage].cost.forward_peak, costs[stage].cost.backward_peak) for stage in own)
    rounded = sum(costs[stage].cost.rounded for stage in own)
    if layout.zero_stage == 3:  # a shard, and no transpose
        rounded /= 2 * layout.num_shards
    parameters, host = static.parameters + static.buffers + rounded, off
    gradients, optimizer = static.gradients, static.masters + static.states
    if layout.offload_parameters is not None:
        parameters -= states.shard_bytes
        host += states.shard_bytes
        passes += states.shard_in_use
    update = states.update if states.device_type == "cpu" or layout.offload_optimizer is None else 0  # by the host
    if layout.offload_optimizer is not None:
        host += gradients + optimizer
        gradients, optimizer = 0, 0
        # One bucket is here at a time: all that its update needs, or its gradients and new values alone.
        update += states.largest_bucket // (1 if layout.offload_optimizer != "cpu" else 2)
        update += states.largest_bucket // 3 if states.shard_in_use else 0  # its parameters are in the file too
        passes += states.largest_bucket // 3
    transient = states.gradients
    # Buffers of gradients stay for the next step on a CPU; a GPU has given them back before the update.
    given_back = saved + states.gathered + (0 if states.device_type == "cpu" else transient)
    return Memory(
        parameters=parameters,
        gradients=gradients + transient,
        optimizer=optimizer,
        activations=saved,
        temporary=max(passes, update - given_back),
        gathered=states.gathered,
        host=host,
    )


def activations(
    layout: Layout, own: Sequence[int], costs: Sequence[StageCost], alive: set[tuple]
) -> tuple[float, float]:
    """Return the bytes of saved activations on the device, and of those that are offloaded."""

    def total(name: str) -> float:
        return max(
            sum(
                waiting * getattr(costs[stage], name) + left * costs[stage].cost.deferred
                for stage, waiting, left in zip(own, counts, counts[len(own) :], strict=False)
            )
            for counts in alive
        )

    saved = total("saved")
    if layout.offload_activations is None:
        return saved, 0.0
    # The newest layer stays. In the backward pass the one before it is read back while this one is used.
    newest = 2 * max(costs[stage].largest_layer for stage in own)
    here = min(saved, total("outside") + newest)
    return here, saved - here


@cache
def peak_activations(style: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[set[tuple[int, ...]]]:
    """Return, for each rank, the peak numbers of live activations of its chunks.

    Each element is a set of tuples; none of them is exceeded by another one in every position. A tuple has the number
    of micro-batches of each chunk that wait for their backward pass, and then the number of those of which a split
    backward pass has left the weight gradients.
    """
    schedule = SCHEDULES[style] if num_ranks > 1 else SCHEDULES["1f1b"]
    # More micro-batches only repeat the steady state, except for GPipe, which keeps the activations of all of them.
    few = num_microbatches if style == "gpipe" else min(num_microbatches, 3 * num_ranks)
    found = []
    for rank in range(num_ranks):
        own = schedule.stages_of(rank, num_ranks, num_chunks)
        found.append(_largest(_alive(schedule.actions(rank, num_ranks, few, num_chunks), own)))
    return found


def _alive(actions: Sequence[Action], own: Sequence[int]) -> set[tuple[int, ...]]:
    counts, deferred, seen = dict.fromkeys(own, 0), dict.fromkeys(own, 0), set()
    for action in actions:
        if action.kind is Kind.FORWARD:
            counts[action.stage] += 1
        elif action.kind is Kind.BACKWARD_WEIGHT:
            deferred[action.stage] -= 1
        else:
            counts[action.stage] -= 1
            deferred[action.stage] += action.kind is Kind.BACKWARD_INPUT
        seen.add((*counts.values(), *deferred.values()))
    return seen


def _largest(found: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Keep the maximal tuples: those that no other tuple matches or exceeds in every position."""
    return {
        each
        for each in found
        if not any(other != each and all(a >= b for a, b in zip(other, each, strict=True)) for other in found)
    }
