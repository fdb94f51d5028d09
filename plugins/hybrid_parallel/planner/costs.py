"""Data types of a prediction: the cost of a stage, and the memory and seconds of a layout."""

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
    """Peak memory of one rank, in bytes.

    Attributes:
        parameters, gradients, optimizer: persistent memory; `optimizer` counts states and fp32 master weights.
        activations: the peak of the activations saved for backward passes.
        temporary: additional memory of the pass that needs the most.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float

    @property
    def total(self) -> float:
        """Sum of all parts, in bytes."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary


class TooLarge(ConfigurationError):
    """A layout needs more memory than a device has.

    Attributes:
        need: bytes that the fullest rank needs.
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
    """Breakdown of the time of a step, for the busiest rank of the pipeline.

    Attributes:
        compute: seconds of the forward and backward passes.
        comm: seconds of the tensor-parallel collectives, which do not overlap with computation.
        bubble: idle seconds in the pipeline.
        reduction: seconds of the reduction of gradients and the all-gather of parameters over replicas that do not
            overlap with a backward pass.
        optimizer: seconds of the update.
    """

    compute: float
    comm: float
    bubble: float
    reduction: float
    optimizer: float

    @property
    def total(self) -> float:
        """Sum of all parts: the seconds of a step."""
        return self.compute + self.comm + self.bubble + self.reduction + self.optimizer


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of a layout.

    Attributes:
        layout: the layout.
        memory: memory of the fullest rank.
        rank: position of that rank on the pipeline axis.
        seconds: time of a step.
        model_flops: FLOPs of a step over all ranks: three forward passes, without recomputation.
    """

    layout: Layout
    memory: Memory
    rank: int
    seconds: Seconds
    model_flops: float


@dataclass(frozen=True)
class StageCost:
    """Cost of one micro-batch on one stage.

    Attributes:
        cost: the sum over the parts of the stage; peaks are the maximum over the parts.
        output: bytes that the stage sends to the next one.
        seconds: time of each kind of pass, including its collectives.
    """

    cost: PartCost
    output: float
    seconds: Mapping[Kind, float]

    @staticmethod
    def of(cost: PartCost, output: float) -> StageCost:
        """Split the backward pass into its input half and its weight half; the latter is at most 60 % of it."""
        late = min(cost.weights, 0.6 * cost.backward)
        seconds = {
            Kind.FORWARD: cost.forward + cost.forward_talk,
            Kind.BACKWARD: cost.backward + cost.backward_talk,
            Kind.BACKWARD_INPUT: cost.backward - late + cost.backward_talk,
            Kind.BACKWARD_WEIGHT: late,
        }
        return StageCost(cost, output, seconds)


def shared_over(cost: PartCost, cp_size: int, link: Link, gathered: float) -> PartCost:
    """Return the cost of a part whose sequence is sharded over `cp_size` context-parallel ranks.

    Each rank attends to the whole sequence, so both passes all-gather the keys and values.

    Args:
        gathered: size of the keys and values relative to the hidden state.
    """
    if cp_size == 1:
        return cost
    share = PartCost().mixed(cost, 1 / cp_size)
    gathered = link.collective("all_gather", gathered * cost.output, cp_size)
    return replace(share, forward_talk=share.forward_talk + gathered, backward_talk=share.backward_talk + gathered)


def recomputed(cost: PartCost) -> PartCost:
    """Return the cost of a layer that saves only its input and is recomputed before its backward pass."""
    return replace(
        cost,
        backward=cost.backward + cost.forward,
        backward_talk=cost.backward_talk + cost.forward_talk,
        saved=cost.output,
        backward_peak=cost.saved + max(cost.backward_peak, cost.forward_peak),
    )


def added(costs: Sequence[tuple[PartCost, int]]) -> PartCost:
    """Add up (cost, number of runs) pairs; peaks are maxima, because one part runs at a time."""
    totals = {name: sum(getattr(cost, name) * count for cost, count in costs) for name in _ADDED}
    peaks = {name: max((getattr(cost, name) for cost, _ in costs), default=0.0) for name in _PEAKS}
    return PartCost(**totals, **peaks)
