"""Data types of a prediction: the cost of a stage, and the memory and seconds of a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.pipeline.schedule import Kind
from plugins.hybrid_parallel.planner.device import Device, Link
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.profile import PartCost
from plugins.hybrid_parallel.shard_report import in_bytes

_ADDED = ("forward", "backward", "weights", "forward_talk", "backward_talk", "flops", "saved", "again", "again_talk")
_ADDED += ("results", "deferred", "rounded")
# Parts of the memory of a rank, and of the seconds of a step.
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered", "temporary")
SECONDS_PARTS = ("compute", "comm", "bubble", "gathers", "reduction", "optimizer", "offload")
_ALWAYS = ("parameters", "gradients", "optimizer", "activations", "temporary")
_SPREAD, _SPREAD_OF_PEAKS = 0.1, 0.25  # of activations, and of temporary memory, see docs/planner.md
_SMALL_TENSORS = 2**16
_PEAKS = ("forward_peak", "backward_peak")


@dataclass(frozen=True)
class Memory:
    """Peak memory of one rank, in bytes."""

    # parameters, gradients, optimizer: persistent memory; `optimizer` counts states and fp32 master weights
    parameters: float
    gradients: float
    optimizer: float
    activations: float  # the peak of the activations saved for backward passes
    temporary: float  # additional memory of the pass, or the update, that needs the most
    gathered: float = 0.0  # parameters that are gathered at once under ZeRO stage 3
    # bytes that the rank keeps in the memory of the machine or in a file instead; not part of the sum
    host: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Name of each part of the device's memory -> its bytes."""
        return {name: getattr(self, name) for name in MEMORY_PARTS}

    @property
    def total(self) -> float:
        """Sum of all parts, in bytes."""
        return sum(self.parts.values())

    @property
    def needed(self) -> float:
        """Bytes that a device must have: activations are known to within a tenth, temporary memory to a quarter.

        Ids, positions, masks and numbers that no part of the model saves come on top.
        """
        return self.total + _SPREAD * self.activations + _SPREAD_OF_PEAKS * self.temporary + _SMALL_TENSORS


class TooLarge(ConfigurationError):
    """A layout needs more memory than a device has.

    Attributes:
        memory: memory of the fullest rank.
    """

    def __init__(self, memory: Memory, rank: int, limit: float) -> None:
        self.memory = memory
        parts = ", ".join(f"{name} {in_bytes(size)}" for name, size in memory.parts.items() if size or name in _ALWAYS)
        super().__init__(
            f"needs {in_bytes(memory.needed)} of {in_bytes(limit)} on rank {rank} of the pipeline: {parts}"
        )


@dataclass(frozen=True)
class Seconds:
    """Breakdown of the time of a step, for the busiest rank of the pipeline."""

    compute: float  # seconds of the forward and backward passes
    comm: float  # seconds of the tensor-parallel collectives, which do not overlap with computation
    bubble: float  # idle seconds in the pipeline
    # seconds of the reduction of gradients and the all-gather of parameters over replicas that do not overlap with a
    # backward pass
    reduction: float
    optimizer: float  # seconds of the update
    # seconds of the all-gathers of parameters before passes (ZeRO stage 3) that do not overlap with them
    gathers: float = 0.0
    offload: float = 0.0  # seconds of copies to and from the memory of the machine, or a file, that do not overlap

    @property
    def parts(self) -> dict[str, float]:
        """Name of each part -> its seconds."""
        return {name: getattr(self, name) for name in SECONDS_PARTS}

    @property
    def total(self) -> float:
        """Sum of all parts: the seconds of a step."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of a layout."""

    layout: Layout
    memory: Memory  # memory of the fullest rank
    rank: int  # position of that rank on the pipeline axis
    seconds: Seconds  # time of a step
    model_flops: float  # FLOPs of a step over all ranks: three forward passes, without recomputation


@dataclass(frozen=True)
class StageCost:
    """Cost of one micro-batch on one stage."""

    cost: PartCost  # the sum over the parts of the stage; peaks are the maximum over the parts
    output: float  # bytes that the stage sends to the next one
    seconds: Mapping[Kind, float]  # time of each kind of pass, including its collectives
    largest_layer: float = 0.0  # bytes that the layer which saves most saves
    outside: float = 0.0  # bytes saved by what is no layer, such as the head

    @property
    def saved(self) -> float:
        """Bytes that the stage saves."""
        return self.cost.saved

    @staticmethod
    def of(layers: Sequence[tuple[PartCost, int]], gaps: Sequence[tuple[PartCost, int]], output: float) -> StageCost:
        """Add up a stage's (cost, number of runs); the weight half of a backward pass is at most 60 % of it."""
        cost = added([*gaps, *layers])
        late = min(cost.weights, 0.6 * cost.backward)
        seconds = {
            Kind.FORWARD: cost.forward + cost.forward_talk,
            Kind.BACKWARD: cost.backward + cost.backward_talk,
            Kind.BACKWARD_INPUT: cost.backward - late + cost.backward_talk,
            Kind.BACKWARD_WEIGHT: late,
        }
        largest = max((each.saved for each, _ in layers), default=0.0)
        return StageCost(cost, output, seconds, largest, sum(each.saved * count for each, count in gaps))


def shared_over(share: PartCost, cp_size: int, link: Link, gathered: float) -> PartCost:
    """Return the cost of a part whose sequence is sharded over `cp_size` context-parallel ranks.

    Each rank attends to the whole sequence, so both passes all-gather the keys and values. On a ring, a forward pass
    holds two blocks of them, the present one and the next; a backward pass also holds three blocks of their gradients.

    Args:
        share: the cost for a rank's share of the tokens.
        gathered: size of the keys and values relative to the hidden state.
    """
    if cp_size == 1:
        return share
    block = gathered * share.output
    seconds = link.collective("all_gather", cp_size * block, cp_size)
    return replace(
        share,
        forward_talk=share.forward_talk + seconds,
        backward_talk=share.backward_talk + seconds,
        forward_peak=share.forward_peak + 2 * block,
        backward_peak=share.backward_peak + 5 * block,
    )


def dispatched(cost: PartCost, layout: Layout, device: Device) -> PartCost:
    """Return the cost of a part whose tokens are sent to the ranks of their experts, and back, in both passes.

    All experts are assumed to get as many tokens. Ranks exchange the numbers of rows first. What is sent and what
    arrives are in memory together.
    """
    if layout.ep_size == 1 or not cost.routed:
        return cost
    rows = cost.routed / layout.tp_size
    counts, there = (device.all_to_all(size, layout.ep_size, layout.tp_size) for size in (0.0, rows))
    # The profiled experts have the tokens of all tensor-parallel ranks before and after them, and these only their own.
    return replace(
        cost,
        saved=cost.saved - 2 * (cost.routed - rows),
        forward_talk=cost.forward_talk + counts + 2 * there,
        backward_talk=cost.backward_talk + 2 * there,
        again_talk=cost.again_talk + counts + 2 * there,
        forward_peak=cost.forward_peak + 2 * rows,
        backward_peak=cost.backward_peak + 2 * rows,
    )


def recomputed(cost: PartCost, by_operators: bool = False) -> PartCost:
    """Return the cost of a recomputed layer; `by_operators`: it saves results of products and attention."""
    again, talk, results = cost.forward, cost.forward_talk, 0.0
    if by_operators:
        again, talk, results = cost.again, cost.again_talk, cost.results
    return replace(
        cost,
        backward=cost.backward + again,
        backward_talk=cost.backward_talk + talk,
        saved=cost.output + results,
        backward_peak=max(0.0, cost.saved - results) + max(cost.backward_peak, cost.forward_peak),
    )


def added(costs: Sequence[tuple[PartCost, int]]) -> PartCost:
    """Add up (cost, number of runs) pairs; peaks are maxima, because one part runs at a time."""
    totals = {name: sum(getattr(cost, name) * count for cost, count in costs) for name in _ADDED}
    peaks = {name: max((getattr(cost, name) for cost, _ in costs), default=0.0) for name in _PEAKS}
    return PartCost(**totals, **peaks)
