"""Predict the cost of a layout: memory of the fullest rank, and seconds of a step."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Kind
from plugins.hybrid_parallel.pipeline.simulate import simulate
from plugins.hybrid_parallel.planner.activations_in_flight import peak_activations
from plugins.hybrid_parallel.planner.costs import (
    Memory,
    Prediction,
    Seconds,
    StageCost,
    TooLarge,
    recomputed,
    shared_over,
)
from plugins.hybrid_parallel.planner.device import Device
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.memory_model import StaticMemory, static_of
from plugins.hybrid_parallel.planner.op_recorder import Part
from plugins.hybrid_parallel.planner.planned_buckets import RankParameters, plan_buckets
from plugins.hybrid_parallel.planner.profile import PartCost, Profile, Profiler
from plugins.hybrid_parallel.planner.rank_memory import RankStates, memory_of_rank
from plugins.hybrid_parallel.planner.replica_time import replica_seconds
from plugins.hybrid_parallel.planner.stage_map import ModelMap, StageParts

_logger = get_logger(__name__)


@dataclass(frozen=True)
class _Placed:
    """Layout with the inputs of its prediction.

    Attributes:
        layout: the layout.
        ranks: for each rank of the pipeline, the indices of its stages.
        states: what each rank of the pipeline keeps.
        costs: cost of each stage, for one micro-batch.
    """

    layout: Layout
    ranks: Sequence[Sequence[int]]
    states: Sequence[RankStates]
    costs: Sequence[StageCost]


class Predictor:
    """Predictor of the cost of layouts, for one model on one kind of device.

    Args:
        model: layers and stages of the model.
        profiler: profiles the parts of the model.
    """

    def __init__(self, model: ModelMap, profiler: Profiler) -> None:
        self.model, self.profiler = model, profiler
        self._profiles: dict[tuple[int, bool], Profile | ConfigurationError] = {}
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
            layout: the layout.
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
        """Return the memory of each rank of the first pipeline.

        Raises:
            ConfigurationError: the layout does not suit this model, or this version does not support it.
        """
        return self._memories(self._place(layout))

    def stage_costs(self, layout: Layout) -> Sequence[StageCost]:
        """Return the cost of one micro-batch on each stage.

        Raises:
            ConfigurationError: see `memories`.
        """
        return self._place(layout).costs

    def _place(self, layout: Layout) -> _Placed:
        schedule, stages = layout.config.schedule, self.model.stages(layout.num_stages)
        ranks = [schedule.stages_of(rank, layout.pp_size, layout.num_chunks) for rank in range(layout.pp_size)]
        profile = self.profile(layout.tp_size, layout.sequence)
        states = self._states(layout, stages, ranks, profile)
        return _Placed(layout, ranks, states, self._stage_costs(layout, stages, ranks))

    def profile(self, tp_size: int, sequence: bool) -> Profile:
        """Return the profile of the parts for a tensor-parallel size; profiles and errors are cached.

        Raises:
            ConfigurationError: the model cannot be sharded like this.
        """
        key = tp_size, sequence
        if key not in self._profiles:
            _logger.info("looking at the model under tp_size=%d%s", tp_size, ", sequence cut" if sequence else "")
            try:
                self._profiles[key] = self.profiler.profile(tp_size, sequence)
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
        share = {None: 0.0, "full": 1.0}.get(layout.recomputation, layout.recomputation)
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
        """Return the cost of a stage that saves the activations of the layers `kept` and recomputes the layers `again`.

        Results are cached, because most stages are equal.
        """
        key = (layout.tp_size, layout.cp_size, layout.sequence, layout.rows, kept, again, gaps)
        if key not in self._costs:
            parts = self.parts(layout)
            layers = [(parts[part], count) for part, count in Counter(kept).items()]
            layers += [(recomputed(parts[part]), count) for part, count in Counter(again).items()]
            last = (*again, *kept)[-1:]
            self._costs[key] = StageCost.of(
                layers, [(parts[gap], 1) for gap in gaps], parts[last[0]].output if last else 0.0
            )
        return self._costs[key]

    def parts(self, layout: Layout) -> dict[Part, PartCost]:
        """Return the cost of each part on one rank, for one micro-batch of the layout."""
        key = (layout.tp_size, layout.cp_size, layout.sequence, layout.rows)
        if key not in self._parts:
            parts = self.profile(layout.tp_size, layout.sequence).at(layout.rows)
            link = self.device.ring(layout.cp_size, layout.tp_size)
            gathered = self._keys_and_values(layout)
            self._parts[key] = {part: shared_over(cost, layout.cp_size, link, gathered) for part, cost in parts.items()}
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
        number = layout.num_shards
        shards_parameters = layout.zero_stage == 3 and (number > 1 or layout.offload_parameters is not None)
        cut = (layout.num_stages, layout.pp_style, layout.tp_size, number, shards_parameters)
        found: dict[tuple[int, ...], RankStates] = {}
        for own in ranks:
            shapes = tuple(stages[stage].shape for stage in own)
            if shapes in found:
                continue
            if (cut, shapes) not in self._kept:
                held = plan_buckets(
                    {stage: stages[stage] for stage in own}, profile, layout.config, number, self.device.type
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
