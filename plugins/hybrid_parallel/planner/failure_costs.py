"""What failures cost a planned layout: seconds and speeds for the simulation of `goodput`, and its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from plugins.hybrid_parallel.planner.costs import Prediction
from plugins.hybrid_parallel.planner.device import Device
from plugins.hybrid_parallel.planner.goodput import RECOVERIES, Costs, Failures, Goodput, goodput
from plugins.hybrid_parallel.planner.layout import Layout

_HOUR = 3600.0


@dataclass(frozen=True)
class FailureAssumptions:
    """What the planner cannot know about failures.

    Attributes:
        device_hours: mean hours between two failures of one device, or of what it needs.
        storage: bytes per second of the shared file system, for each device.
        start: seconds until processes have started, connected and warmed up.
        repair_hours: hours until a machine that failed can be used again.
    """

    device_hours: float
    storage: float
    start: float
    repair_hours: float


def state_bytes(prediction: Prediction) -> float:
    """Return the bytes of a checkpoint, if all stages were as large as the fullest one."""
    layout, memory = prediction.layout, prediction.memory
    of_replica = layout.tp_size * layout.pp_size
    copies = layout.num_shards if layout.zero_stage == 3 else 1
    offloaded = memory.host if layout.offloads else 0.0
    return of_replica * (memory.parameters * copies + (memory.optimizer + offloaded) * layout.num_shards)


def costs_of(prediction: Prediction, device: Device, assumed: FailureAssumptions) -> Costs:
    """Return the seconds that failures cost under a planned layout."""
    whole = state_bytes(prediction) / (assumed.storage * prediction.layout.world_size)
    to_neighbour = (prediction.memory.optimizer + prediction.memory.host) / device.between.bandwidth
    return Costs(
        step=prediction.seconds.total,
        save=whole,
        load=whole,
        start=assumed.start,
        copy=to_neighbour,
        fetch=to_neighbour,
    )


def failures_of(layout: Layout, device: Device, assumed: FailureAssumptions) -> Failures:
    """Return the machines of a layout; a failure of a device takes its whole machine."""
    node_size = min(device.node_size, layout.world_size)
    return Failures(
        layout.world_size // node_size, assumed.device_hours * _HOUR / node_size, assumed.repair_hours * _HOUR
    )


def speed_of(layout: Layout, device: Device) -> Callable[[int], float]:
    """Return the function: machines that work -> speed of training with the replicas that fit on them.

    The global batch stays, so that each replica that is left runs more micro-batches.
    """
    node_size = min(device.node_size, layout.world_size)
    of_replica = layout.world_size // layout.dp_size
    total, ramp = layout.num_microbatches * layout.dp_size, layout.pp_size - 1

    def speed(working: int) -> float:
        replicas = min(working * node_size // of_replica, layout.dp_size)
        return (layout.num_microbatches + ramp) / (ceil(total / replicas) + ramp) if replicas else 0.0

    return speed


def goodputs(prediction: Prediction, device: Device, assumed: FailureAssumptions) -> dict[str, Goodput]:
    """Simulate a planned layout under failures: name of each way to recover -> shares of time."""
    costs, failures = costs_of(prediction, device, assumed), failures_of(prediction.layout, device, assumed)
    speed = speed_of(prediction.layout, device)
    return {each.name: goodput(each, costs, failures, speed) for each in RECOVERIES}


def to_text(results: Mapping[str, Goodput], failures: Failures) -> str:
    """Format the shares of time as a table."""
    header = ("with failures", "goodput", "saving", "lost", "recovering", "fewer", "checkpoint every")
    rows = [header]
    for name, each in results.items():
        parts = (each.useful, each.saving, each.lost, each.recovering, each.fewer)
        rows.append((name, *(f"{100 * part:.1f} %" for part in parts), duration(each.interval)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    machines = f"{failures.machines} machine{'s' if failures.machines > 1 else ''}"
    return "\n".join([f"a failure every {duration(failures.between)} on {machines}", "", *lines])


def duration(seconds: float) -> str:
    """Format a time in its largest unit."""
    for unit, size in (("d", 24 * _HOUR), ("h", _HOUR), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
