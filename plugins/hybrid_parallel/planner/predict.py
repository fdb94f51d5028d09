"""Predict the cost of a layout: memory of the fullest rank, and seconds of a step.

Time of what replicas exchange, and of what a rank keeps elsewhere: gradients, gathered parameters, states.

The volumes are those of ZeRO (Rajbhandari et al., arXiv 1910.02054, section 7): of P parameters, a reduce-scatter and
an all-gather move P elements each, an all-reduce 2 P. Stage 3 gathers the parameters twice for each micro-batch.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Kind
from plugins.hybrid_parallel.pipeline.timeline import simulate
from plugins.hybrid_parallel.planner.costs import (
    Memory,
    Prediction,
    Seconds,
    StageCost,
    TooLarge,
    dispatched,
    recomputed,
    shared_over,
)
from plugins.hybrid_parallel.planner.device import Device
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.op_recorder import Part
from plugins.hybrid_parallel.planner.profile import PartCost, Profile, Profiler
from plugins.hybrid_parallel.planner.rank_memory import (
    RankParameters,
    RankStates,
    StaticMemory,
    activations,
    memory_of_rank,
    peak_activations,
    plan_buckets,
    static_of,
)
from plugins.hybrid_parallel.planner.stage_map import ModelMap, StageParts


@dataclass(frozen=True)
class ReplicaSeconds:
    """Seconds of a step on one rank that passes do not hide."""

    gathers: float  # all-gathers of parameters before passes
    reduction: float  # reduction of gradients, and the all-gather of updated parameters
    optimizer: float  # the update
    offload: float  # copies between the device and the memory of the machine, or a file


def replica_seconds(
    device: Device, states: RankStates, own: Sequence[int], costs: Sequence[StageCost]
) -> ReplicaSeconds:
    """Return the seconds of a rank that holds the stages `own`."""
    layout, passes = states.layout, states.layout.num_microbatches
    forward = sum(costs[stage].cost.forward for stage in own)
    backward = sum(costs[stage].cost.backward for stage in own)
    gathers = _gathers(device, states, forward, backward)
    reads = states.shard_bytes * 2 * passes if layout.offload_parameters is not None else 0.0
    moved = 2 * passes * activations(layout, own, costs, {(1,) * len(own) + (0,) * len(own)})[1]
    copies = reads / device.place_bandwidth(layout.offload_parameters)
    copies += moved / device.place_bandwidth(layout.offload_activations)
    update, copied = _update(device, states)
    return ReplicaSeconds(
        gathers=gathers,
        reduction=_reduction(device, states, backward),
        optimizer=update,
        offload=copied + max(0.0, copies - device.overlap * passes * (forward + backward)),
    )


def _gathers(device: Device, states: RankStates, forward: float, backward: float) -> float:
    """Return the exposed seconds of the gathers of all micro-batches: a unit is gathered while the one before runs.

    Nothing runs before the first unit of a pass.
    """
    layout, total, first, last = states.layout, 0.0, 0.0, 0.0
    for axis, shards in layout.shards.items():
        sizes = states.held.units(axis).values() if shards > 1 else ()
        units = [_shards_seconds(device, layout, axis, "all_gather", size) for size in sizes]
        total += sum(units)
        first, last = first + sum(units[:1]), last + sum(units[-1:])
    exposed = [
        each + max(0.0, total - each - device.overlap * rest) for each, rest in ((first, forward), (last, backward))
    ]
    return layout.num_microbatches * sum(exposed)


def _reduction(device: Device, states: RankStates, backward: float) -> float:
    """Return the exposed seconds of reductions, and of the all-gather of updated parameters."""
    layout, reduce, rest = states.layout, 0.0, 0.0
    for axis, replicas in layout.replicas.items():
        buckets = [bucket for bucket in states.held.buckets if bucket.axis == axis]
        gradients, shards = sum(bucket.grad_bytes for bucket in buckets), layout.shards[axis]
        if layout.zero_stage == 0:
            reduce += device.ring(replicas, layout.strides[axis]).collective("all_reduce", gradients, replicas)
            continue
        reduce += _shards_seconds(device, layout, axis, "reduce_scatter", gradients)
        far = device.ring(replicas // shards, layout.strides[axis] * shards)
        rest += far.collective("all_reduce", gradients / shards, replicas // shards)
        whole = sum(bucket.size * bucket.itemsize for bucket in buckets if bucket.unit is None)
        rest += _shards_seconds(device, layout, axis, "all_gather", whole)
    reductions = layout.num_microbatches if layout.zero_stage >= 2 else 1
    # The last backward pass hides them, or each hides its own.
    return reductions * max(0.0, reduce - device.overlap * backward) + rest


def _shards_seconds(device: Device, layout: Layout, axis: str, kind: str, size: float) -> float:
    """Return the seconds of a reduce-scatter or an all-gather between the ranks that share states of an axis.

    CPUs of several machines send their shards to each other directly, whatever collectives the backend has. With
    several of these ranks on each machine, they do so inside a machine first, then across.
    """
    shards, stride = layout.shards[axis], layout.strides[axis]
    span = (shards - 1) * stride
    if device.type != "cpu" or span < device.node_size:
        return device.ring(shards, stride).collective(kind, size, shards)
    here = device.node_size // stride
    if not 1 < here < shards or shards % here:
        here = 1
    inside, across = (replace(link, rates={}) for link in (device.inside, device.between))
    return inside.collective(kind, size, here) + across.collective(kind, size / here, shards // here)


def _update(device: Device, states: RankStates) -> tuple[float, float]:
    """Return the seconds of the update, and of the copies that it needs."""
    layout, static = states.layout, states.static
    elements = sum(bucket.trained / bucket.num_shards for bucket in states.held.buckets)
    size = elements * device.optimizer_bytes + static.masters / 4 * device.master_bytes
    place = layout.offload_optimizer
    if place is None:
        return size / device.bandwidth, 0.0
    bandwidth = device.place_bandwidth(place)
    if place == "cpu":  # gradients to the host, new values back
        return size / device.host_bandwidth, elements * 6 / bandwidth
    # States, masters and gradients are read and written; gradients were written before.
    moved = 2 * (static.masters + static.states) + 2 * static.gradients
    on_host = device.bandwidth if device.type == "cpu" else device.host_bandwidth
    return size / on_host, moved / bandwidth


_logger = get_logger(__name__)


@dataclass(frozen=True)
class _Placed:
    """Layout with the inputs of its prediction."""

    layout: Layout
    ranks: Sequence[Sequence[int]]  # for each rank of the pipeline, the indices of its stages
    states: Sequence[RankStates]  # what each rank of the pipeline keeps
    costs: Sequence[StageCost]  # cost of each stage, for one micro-batch


class Predictor:
    """Predictor of the cost of layouts, for one model on one kind of device."""

    def __init__(self, model: ModelMap, profiler: Profiler) -> None:
        self.model, self.profiler = model, profiler
        self._profiles: dict[tuple[int, bool, int], Profile | ConfigurationError] = {}
        self._parts: dict[tuple, dict[Part, PartCost]] = {}
        self._costs: dict[tuple, StageCost] = {}
        self._kept: dict[tuple, tuple[RankParameters, StaticMemory]] = {}

    @property
    def device(self) -> Device:
        """The kind of device that costs are predicted for."""
        return self.profiler.device

    def within(self, memory: float) -> Predictor:
        """Return a predictor for the same kind of device with `memory` bytes, which shares what is computed."""
        other = copy.copy(self)
        other.profiler = replace(self.profiler, device=replace(self.device, memory=memory))
        return other

    def predict(self, layout: Layout, exact: bool = True, limit: float | None = None) -> Prediction:
        """Predict the cost of a layout.

        Args:
            exact: simulate the schedule; otherwise estimate its bubble, which is accurate enough for sorting.
            limit: maximum bytes of a rank; None for no limit.

        Raises:
            TooLarge: a rank needs more than `limit`.
            ConfigurationError: the layout does not suit this model, or this version does not support it.
        """
        placed = self._place(layout)
        memories = self._memories(placed)
        rank = max(range(len(memories)), key=lambda each: memories[each].needed)
        memory = memories[rank]
        if limit is not None and memory.needed > limit:
            raise TooLarge(memory, rank, limit)
        return Prediction(layout, memory, rank, self._seconds(placed, exact), self._flops(layout))

    def memories(self, layout: Layout) -> list[Memory]:
        """Return the memory of each rank of the first pipeline; ConfigurationError if the layout cannot be."""
        return self._memories(self._place(layout))

    def _place(self, layout: Layout) -> _Placed:
        schedule, stages = layout.config.schedule, self.model.stages(layout.num_stages)
        ranks = [schedule.stages_of(rank, layout.pp_size, layout.num_chunks) for rank in range(layout.pp_size)]
        profile = self.profile(layout.tp_size, layout.sequence, layout.ep_size)
        states = self._states(layout, stages, ranks, profile)
        return _Placed(layout, ranks, states, self._stage_costs(layout, stages, ranks))

    def profile(self, tp_size: int, sequence: bool, ep_size: int = 1) -> Profile:
        """Return the profile of the parts for a way of sharding layers; profiles and errors are cached.

        Under expert parallelism a rank has fewer experts, which get tokens of more ranks: as many rows, fewer weights.

        Raises:
            ConfigurationError: the model cannot be sharded like this.
        """
        key = tp_size, sequence, ep_size
        if key not in self._profiles:
            _logger.info("looking at the model under tp_size=%d%s", tp_size, ", sequence cut" if sequence else "")
            try:
                if ep_size == 1:
                    self._profiles[key] = self.profiler.profile(tp_size, sequence)
                else:
                    whole = self.profile(tp_size, sequence)
                    self._profiles[key] = self.profiler.with_shared_experts(whole, *key)
            except ConfigurationError as error:
                self._profiles[key] = error
        found = self._profiles[key]
        if isinstance(found, ConfigurationError):
            raise found
        return found

    # ----- passes -----

    def _stage_costs(
        self, layout: Layout, stages: Sequence[StageParts], ranks: Sequence[Sequence[int]]
    ) -> list[StageCost]:
        found: dict[int, StageCost] = {}
        share = {None: 0.0, "full": 1.0, "operators": 1.0}.get(layout.recomputation, layout.recomputation)
        for own in ranks:
            left = ceil(share * sum(len(stages[stage].layers) for stage in own))
            for stage in own:
                layers = stages[stage].layers
                found[stage] = self._stage_cost(layout, layers[left:], layers[:left], stages[stage].gaps)
                left -= min(left, len(layers))
        return [found[stage] for stage in range(len(stages))]

    def _stage_cost(
        self, layout: Layout, kept: tuple[Part, ...], again: tuple[Part, ...], gaps: tuple[Part, ...]
    ) -> StageCost:
        """Return the cached cost of a stage that saves activations of layers `kept` and recomputes those `again`."""
        by_operators = layout.recomputation == "operators"
        cut = (layout.tp_size, layout.cp_size, layout.ep_size, layout.sequence)
        key = (*cut, layout.rows, by_operators, kept, again, gaps)
        if key not in self._costs:
            parts = self.parts(layout)
            layers = [(parts[part], count) for part, count in Counter(kept).items()]
            layers += [(recomputed(parts[part], by_operators), count) for part, count in Counter(again).items()]
            last = (*again, *kept)[-1:]
            self._costs[key] = StageCost.of(
                layers, [(parts[gap], 1) for gap in gaps], parts[last[0]].output if last else 0.0
            )
        return self._costs[key]

    def parts(self, layout: Layout) -> dict[Part, PartCost]:
        """Return the cost of each part on one rank, for one micro-batch of the layout."""
        key = (layout.tp_size, layout.cp_size, layout.ep_size, layout.sequence, layout.rows)
        if key not in self._parts:
            # Queries of a share meet all keys, as in that share of the samples.
            parts = self.profile(layout.tp_size, layout.sequence, layout.ep_size).at(layout.rows / layout.cp_size)
            link = self.device.ring(layout.cp_size, layout.tp_size, has_all_adapters=False)
            gathered = self._keys_and_values(layout)
            shared = {part: shared_over(cost, layout.cp_size, link, gathered) for part, cost in parts.items()}
            self._parts[key] = {part: dispatched(cost, layout, self.device) for part, cost in shared.items()}
        return self._parts[key]

    def _keys_and_values(self, layout: Layout) -> float:
        """Return the size of a layer's keys and values relative to the hidden state that it returns."""
        if layout.cp_size == 1:
            return 0.0
        config = getattr(self.model.config, "get_text_config", lambda: self.model.config)()
        heads = getattr(config, "num_attention_heads", 1)
        share = 2 * (getattr(config, "num_key_value_heads", None) or heads) / heads
        return share if layout.sequence else share / layout.tp_size

    def _flops(self, layout: Layout) -> float:
        """Return the FLOPs of a step over all ranks: three forward passes, replicated work counted on every rank."""
        (whole,) = self.model.stages(1)
        samples = layout.num_microbatches * layout.dp_size
        ranks = layout.tp_size * layout.cp_size
        return 3 * samples * ranks * self._stage_cost(layout, whole.layers, (), whole.gaps).cost.flops

    # ----- memory -----

    def _memories(self, placed: _Placed) -> list[Memory]:
        return [
            memory_of_rank(states, own, placed.costs, alive)
            for states, own, alive in zip(placed.states, placed.ranks, self._alive(placed.layout), strict=True)
        ]

    @staticmethod
    def _alive(layout: Layout) -> Sequence[set[tuple[int, ...]]]:
        """Return the numbers of live micro-batches of each rank at its peaks."""
        return peak_activations(layout.pp_style, layout.pp_size, layout.num_microbatches, layout.num_chunks)

    def _states(
        self, layout: Layout, stages: Sequence[StageParts], ranks: Sequence[Sequence[int]], profile: Profile
    ) -> list[RankStates]:
        """Return what each rank keeps; most ranks of a pipeline are equal."""
        shards_parameters = layout.zero_stage == 3 and (layout.num_shards > 1 or layout.offload_parameters is not None)
        sizes = (layout.tp_size, layout.ep_size, *layout.shards.values())
        cut = (layout.num_stages, layout.pp_style, *sizes, shards_parameters)
        found: dict[tuple[int, ...], RankStates] = {}
        for own in ranks:
            shapes = tuple(stages[stage].shape for stage in own)
            if shapes in found:
                continue
            if (cut, shapes) not in self._kept:
                held = plan_buckets(
                    {stage: stages[stage] for stage in own}, profile, layout.config, layout.shards, self.device.type
                )
                self._kept[cut, shapes] = held, static_of(held, profile, layout.config)
            found[shapes] = RankStates(*self._kept[cut, shapes], layout, self.device.type)
        return [found[tuple(stages[stage].shape for stage in own)] for own in ranks]

    # ----- time -----

    def _seconds(self, placed: _Placed, exact: bool) -> Seconds:
        layout, ranks, costs = placed.layout, placed.ranks, placed.costs
        busy = [
            layout.num_microbatches
            * sum(costs[stage].seconds[Kind.FORWARD] + costs[stage].seconds[Kind.BACKWARD] for stage in own)
            for own in ranks
        ]
        longest = max(range(len(busy)), key=busy.__getitem__)
        comm = layout.num_microbatches * sum(
            costs[stage].cost.forward_talk + costs[stage].cost.backward_talk for stage in ranks[longest]
        )
        pipeline = self._pipeline(layout, costs, busy[longest], exact)
        pairs = zip(placed.states, ranks, strict=True)
        shares = [replica_seconds(self.device, states, own, costs) for states, own in pairs]
        return Seconds(
            compute=busy[longest] - comm,
            comm=comm,
            bubble=max(0.0, pipeline - busy[longest]),
            gathers=max(each.gathers for each in shares),
            reduction=max(each.reduction for each in shares),
            optimizer=max(each.optimizer for each in shares),
            offload=max(each.offload for each in shares),
        )

    def _pipeline(self, layout: Layout, costs: Sequence[StageCost], busy: float, exact: bool) -> float:
        """Return the seconds from the first forward pass to the end of the last backward pass."""
        if layout.pp_size == 1:
            return busy
        if not exact:
            return busy + estimated_bubble(layout, costs)
        # If any two neighbours are on different machines, the pipeline has their pace.
        link = self.device.link((layout.pp_size - 1) * layout.dp_size * layout.tp_size * layout.cp_size)
        send = link.latency + max(cost.output for cost in costs) / link.bandwidth

        def length(count: int) -> float:
            schedule = SCHEDULES[layout.pp_style]
            tables = [
                schedule.actions(rank, layout.pp_size, count, layout.num_chunks) for rank in range(layout.pp_size)
            ]
            return simulate(tables, lambda action: costs[action.stage].seconds[action.kind], lambda a, b: send).length

        count, period = layout.num_microbatches, layout.pp_size
        if count <= 6 * period:
            return length(count)
        # In the steady state every further round takes the same time, so extrapolate from a short schedule.
        few = 4 * period + count % period
        return length(few) + (count - few) // period * (length(few + period) - length(few))


def estimated_bubble(layout: Layout, costs: Sequence[StageCost]) -> float:
    """Estimate the bubble of a pipeline whose stages all take the mean time (formulas in docs/pipelines.md)."""
    mean = {
        kind: sum(cost.seconds[kind] for cost in costs) / layout.pp_size
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    }
    whole = mean[Kind.FORWARD] + mean[Kind.BACKWARD]
    halves = max(0.0, mean[Kind.FORWARD] + mean[Kind.BACKWARD_INPUT] - mean[Kind.BACKWARD_WEIGHT])
    length = halves if SCHEDULES[layout.pp_style].splits_backward else whole
    return (layout.pp_size - 1) * length / layout.num_chunks
