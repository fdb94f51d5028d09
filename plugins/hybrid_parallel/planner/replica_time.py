"""Time of what replicas exchange, and of what a rank keeps elsewhere: gradients, gathered parameters, states.

The volumes are those of ZeRO (Rajbhandari et al., arXiv 1910.02054, section 7): of P parameters, a reduce-scatter and
an all-gather move P elements each, an all-reduce 2 P. Stage 3 gathers the parameters twice for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plugins.hybrid_parallel.planner.costs import StageCost
from plugins.hybrid_parallel.planner.device import Device
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.rank_memory import RankStates, activations


@dataclass(frozen=True)
class ReplicaSeconds:
    """Seconds of a step on one rank that passes do not hide.

    Attributes:
        gathers: all-gathers of parameters before passes.
        reduction: reduction of gradients, and the all-gather of updated parameters.
        optimizer: the update.
        offload: copies between the device and the memory of the machine, or a file.
    """

    gathers: float
    reduction: float
    optimizer: float
    offload: float


def replica_seconds(
    device: Device, states: RankStates, own: Sequence[int], costs: Sequence[StageCost]
) -> ReplicaSeconds:
    """Return the seconds of a rank that holds the stages `own`.

    Args:
        device: the kind of device.
        states: what the rank keeps.
        own: its stages.
        costs: the cost of each stage for one micro-batch.
    """
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
    """Return the exposed seconds of the gathers of all micro-batches: a unit is gathered while the one before runs."""
    layout = states.layout
    if not states.gathered_bytes or states.held.num_shards == 1:
        return 0.0
    link = device.link((states.held.num_shards - 1) * layout.tp_size)
    steps = link.latency * (states.held.num_shards - 1) * (len(states.held.units) - 1)
    each = _shards_seconds(device, layout, "all_gather", states.gathered_bytes, states.held.num_shards) + steps
    exposed = max(0.0, each - device.overlap * forward) + max(0.0, each - device.overlap * backward)
    return layout.num_microbatches * exposed


def _reduction(device: Device, states: RankStates, backward: float) -> float:
    """Return the exposed seconds of reductions, and of the all-gather of updated parameters."""
    layout, held = states.layout, states.held
    if layout.num_replicas == 1:
        return 0.0
    gradients = sum(bucket.grad_bytes for bucket in held.buckets)
    hidden = device.overlap * backward  # by the last backward pass, or by each
    far = device.link((layout.num_replicas - 1) * layout.tp_size)
    if layout.zero_stage == 0:
        ring = device.ring(layout.num_replicas, layout.tp_size)
        return max(0.0, ring.collective("all_reduce", gradients, layout.num_replicas) - hidden)
    shards = held.num_shards
    reduce = max(0.0, _shards_seconds(device, layout, "reduce_scatter", gradients, shards) - hidden)
    reduce *= layout.num_microbatches if layout.zero_stage >= 2 else 1
    copies = far.collective("all_reduce", gradients / shards, layout.num_replicas // shards)
    whole = sum(bucket.size * bucket.itemsize for bucket in held.buckets if bucket.unit is None)
    return reduce + copies + _shards_seconds(device, layout, "all_gather", whole, shards)


def _shards_seconds(device: Device, layout: Layout, kind: str, size: float, shards: int) -> float:
    """Return the seconds of a reduce-scatter or an all-gather between the ranks that share states.

    CPUs of several machines send their shards to each other directly, whatever collectives the backend has. With
    several of these ranks on each machine, they do so inside a machine first, then across.
    """
    span = (shards - 1) * layout.tp_size
    if device.type != "cpu" or span < device.node_size:
        return device.link(span).collective(kind, size, shards)
    here = device.node_size // layout.tp_size
    if not 1 < here < shards or shards % here:
        here = 1
    inside, across = (replace(link, rates={}) for link in (device.inside, device.between))
    return inside.collective(kind, size, here) + across.collective(kind, size / here, shards // here)


def _update(device: Device, states: RankStates) -> tuple[float, float]:
    """Return the seconds of the update, and of the copies that it needs."""
    layout, static = states.layout, states.static
    elements = states.held.trained / states.held.num_shards
    place = layout.offload_optimizer
    if place is None:
        return elements * device.optimizer_bytes / device.bandwidth, 0.0
    bandwidth = device.place_bandwidth(place)
    if place == "cpu":  # gradients to the host, new values back
        return elements * device.optimizer_bytes / device.host_bandwidth, elements * 6 / bandwidth
    # States, masters and gradients are read and written; gradients were written before.
    moved = 2 * (static.masters + static.states) + 2 * static.gradients
    on_host = device.bandwidth if device.type == "cpu" else device.host_bandwidth
    return elements * device.optimizer_bytes / on_host, moved / bandwidth
