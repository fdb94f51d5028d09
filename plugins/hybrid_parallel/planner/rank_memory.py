"""Compute the memory of a rank at its fullest moment: what it keeps, and what the passes and the update add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from plugins.hybrid_parallel.planner.costs import Memory, StageCost
from plugins.hybrid_parallel.planner.grad_buffers import grad_buffer_bytes
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.memory_model import StaticMemory
from plugins.hybrid_parallel.planner.planned_buckets import RankParameters

# Units of parameters at once: the one whose gradients are computed, the next one, and where gathers proceed while the
# rank computes, the one after that.
_UNITS_AT_ONCE = {"cpu": 2, "cuda": 3}


@dataclass(frozen=True)
class RankStates:
    """What a rank keeps over a step, whatever its micro-batches.

    Attributes:
        held: its parameters, in buckets.
        static: bytes of parameters, gradients and optimizer states.
        layout: the layout.
        device_type: "cpu" or "cuda".
    """

    held: RankParameters
    static: StaticMemory
    layout: Layout
    device_type: str

    @cached_property
    def gathered(self) -> int:
        """Bytes of the parameters that are whole at once under ZeRO stage 3: those of neighbouring units."""
        units, count = list(self.held.units.values()), _UNITS_AT_ONCE[self.device_type]
        return max((sum(units[start : start + count]) for start in range(len(units))), default=0)

    @cached_property
    def gathered_bytes(self) -> int:
        """Bytes of all parameters that a pass gathers."""
        return sum(self.held.units.values())

    @cached_property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shards of these parameters."""
        return self.gathered_bytes // self.held.num_shards

    @cached_property
    def shard_in_use(self) -> int:
        """Bytes of a shard of parameters in a file that is in memory while a CPU gathers them."""
        is_in_file = self.device_type == "cpu" and self.layout.offload_parameters is not None
        return max(self.held.units.values(), default=0) // self.held.num_shards if is_in_file else 0

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
        shards = self.held.num_shards
        if self.device_type != "cpu":
            return sum(bucket.size for bucket in self.held.buckets) // shards * 4
        largest = (
            min(each.param.size, bucket.size // shards) * max(each.param.itemsize, 4)
            for bucket in self.held.buckets
            for each in bucket.members
        )
        return 2 * max(largest, default=0)

    @cached_property
    def largest_bucket(self) -> int:
        """Bytes of gradients, masters and states of the bucket that has most of them on this rank."""
        elements = max((bucket.size for bucket in self.held.buckets), default=0) // self.held.num_shards
        sixteen_bit = any(bucket.itemsize < 4 for bucket in self.held.buckets)
        return elements * (16 if sixteen_bit and self.layout.config.mixed_precision.master_weights else 12)


def memory_of_rank(states: RankStates, own: Sequence[int], costs: Sequence[StageCost], alive: set[tuple]) -> Memory:
    """Return the memory of a rank that holds the stages `own`.

    Args:
        states: what it keeps.
        own: its stages.
        costs: the cost of each stage for one micro-batch.
        alive: the numbers of live micro-batches of its stages, see `peak_activations`.
    """
    layout, static = states.layout, states.static
    saved, off = activations(layout, own, costs, alive)
    passes = max(max(costs[stage].cost.forward_peak, costs[stage].cost.backward_peak) for stage in own)
    parameters, host = static.parameters + static.buffers, off
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
