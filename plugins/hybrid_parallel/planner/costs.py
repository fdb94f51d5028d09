"""What a prediction is made of: costs of stages, memory and seconds of a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.inspect.shard_report import in_bytes
from plugins.hybrid_parallel.pipeline.schedule import Kind
from plugins.hybrid_parallel.planner.device import Link
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.profile import PartCost

_ADDED = ("forward", "backward", "weights", "forward_talk", "backward_talk", "flops", "saved")
_PEAKS = ("forward_peak", "backward_peak")


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        parameters, gradients, optimizer: kept between steps; `optimizer` has states and fp32 copies.
        activations: kept for backward passes, at most.
        temporary: of the pass that needs most beside these.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary


class TooLarge(ConfigurationError):
    """A layout does not fit into a device.

    Attributes:
        need: bytes.
    """

    def __init__(self, memory: Memory, rank: int, limit: float) -> None:
        self.need = memory.total
        super().__init__(
            f"needs {in_bytes(memory.total)} of {in_bytes(limit)} on rank {rank} of the pipeline: parameters "
            f"{in_bytes(memory.parameters)}, gradients {in_bytes(memory.gradients)}, optimizer "
            f"{in_bytes(memory.optimizer)}, activations {in_bytes(memory.activations)}, temporary "
            f"{in_bytes(memory.temporary)}"
        )


@dataclass(frozen=True)
class Seconds:
    """Of a step, on the rank that works longest.

    Attributes:
        compute: forward and backward passes.
        talk: collectives over tensor-parallel ranks, which nothing hides.
        bubble: waiting in the pipeline.
        reduction: of gradients and parameters over replicas, as far as no backward pass hides it.
        optimizer: the update.
    """

    compute: float
    comm: float
    bubble: float
    reduction: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.comm + self.bubble + self.reduction + self.optimizer


@dataclass(frozen=True)
class Prediction:
    """A layout and what it costs.

    Attributes:
        memory: of the fullest rank.
        rank: its position on the pipeline axis.
        seconds: of a step.
        model_flops: of a step over all ranks: three forward passes, no recomputation.
    """

    layout: Layout
    memory: Memory
    rank: int
    seconds: Seconds
    model_flops: float


@dataclass(frozen=True)
class StageCost:
    """One stage and one micro-batch.

    Attributes:
        cost: the sum over its parts, peaks the largest of theirs.
        output: bytes that it sends to the next stage.
        seconds: of each pass, with the collectives in it.
    """

    cost: PartCost
    output: float
    seconds: Mapping[Kind, float]

    @staticmethod
    def of(cost: PartCost, output: float) -> StageCost:
        """With the halves of a backward pass, of which the late one is no more than most of it."""
        late = min(cost.weights, 0.6 * cost.backward)
        seconds = {
            Kind.FORWARD: cost.forward + cost.forward_talk,
            Kind.BACKWARD: cost.backward + cost.backward_talk,
            Kind.BACKWARD_INPUT: cost.backward - late + cost.backward_talk,
            Kind.BACKWARD_WEIGHT: late,
        }
        return StageCost(cost, output, seconds)


def shared_over(cost: PartCost, cp_size: int, link: Link, gathered: float) -> PartCost:
    """A part of which each of `cp_size` ranks has its share of a sequence, and attends to all of it: the keys and
    values, `gathered` times as much as the hidden state, come together."""
    if cp_size == 1:
        return cost
    share = PartCost().mixed(cost, 1 / cp_size)
    gathered = link.collective("all_gather", gathered * cost.output, cp_size)
    return replace(share, forward_talk=share.forward_talk + gathered, backward_talk=share.backward_talk + gathered)


def recomputed(cost: PartCost) -> PartCost:
    """A layer that keeps its input alone, and runs again in front of its backward pass."""
    return replace(
        cost,
        backward=cost.backward + cost.forward,
        backward_talk=cost.backward_talk + cost.forward_talk,
        saved=cost.output,
        backward_peak=cost.saved + max(cost.backward_peak, cost.forward_peak),
    )


def added(costs: Sequence[tuple[PartCost, int]]) -> PartCost:
    """Of parts and how often each runs; peaks are the largest, as one part runs at a time."""
    totals = {name: sum(getattr(cost, name) * count for cost, count in costs) for name in _ADDED}
    peaks = {name: max((getattr(cost, name) for cost, _ in costs), default=0.0) for name in _PEAKS}
    return PartCost(**totals, **peaks)
