"""How much of a long run is training when machines fail, in closed form, and how often to save.

`benchmarks/failure_simulation.py` simulates such runs; the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, exp, expm1, lgamma, log, log1p, sqrt

from plugins.hybrid_parallel.planner.costs import Prediction
from plugins.hybrid_parallel.planner.device import Device
from plugins.hybrid_parallel.planner.layout import Layout

DAY, _HOUR = 86400.0, 3600.0
DETECT, REFORM = 10.0, 30.0  # seconds: until a failure is noticed; the processes that are left connect again


@dataclass(frozen=True)
class FailureAssumptions:
    """What the planner cannot know about failures."""

    device_hours: float  # mean hours between two failures of one device, or of what it needs
    storage: float  # bytes per second of the shared file system, for each device
    start: float  # seconds until processes have started, connected and warmed up
    repair_hours: float  # hours until a machine that failed can be used again


@dataclass(frozen=True)
class Goodput:
    """The share of time that is training whose result remains, at the speed of all machines; the interval of saves."""

    useful: float  # the share, from 0 to 1
    interval: float  # seconds of training between checkpoints


def goodputs(prediction: Prediction, device: Device, assumed: FailureAssumptions) -> dict[str, Goodput]:
    """Return the goodput of a planned layout: name of each way to go on after a failure -> goodput.

    Machines fail independently, with exponential times, and a failed device takes its whole machine.
    """
    machines, uptime = machines_of(prediction.layout, device, assumed)
    between, save = uptime / machines, save_seconds(prediction, assumed)
    copy, step = copy_seconds(prediction, device), prediction.seconds.total

    def with_copies(recovery: float, speed: float) -> Goodput:
        # The disk is read only if the neighbour, which has the copy, fails during the recovery.
        interval = min(best_interval(save, between * uptime / (DETECT + recovery + copy)), DAY)
        unhindered = interval / (interval + save) * step / (step + copy) * speed
        # A failure undoes half a step in the mean; one during the recovery begins it again.
        remains = max(1 - step / 2 / between, 0.0) * exp(-(DETECT + recovery + copy) / between)
        return Goodput(unhindered * remains, interval)

    interval = min(best_interval(save, between), DAY)
    # Daly (2006), equation 13, for the mean time of a cycle: exp(recovery / M) * M * (exp(cycle / M) - 1).
    cycle, recovery = (interval + save) / between, (DETECT + assumed.start + save) / between
    return {
        "restart from disk": Goodput(interval / between * exp(-recovery - cycle) / -expm1(-cycle), interval),
        "copies on neighbours, spare machines": with_copies(assumed.start, 1.0),
        # The machines connect again twice: without the one that failed, and when it is back.
        "copies on neighbours, fewer replicas": with_copies(
            2 * REFORM, _mean_speed(prediction.layout, device, machines, assumed.repair_hours * _HOUR, uptime)
        ),
    }


def best_interval(save: float, between: float) -> float:
    """Return the seconds of training between checkpoints that lose the least time (Daly, 2006, equation 37).

    Young's sqrt(2 * save * between) is its first term.

    Args:
        save: seconds that training waits for a checkpoint.
        between: mean seconds between failures.
    """
    if save >= 2 * between:
        return between
    ratio = save / (2 * between)
    return sqrt(2 * save * between) * (1 + sqrt(ratio) / 3 + ratio / 9) - save


def machines_of(layout: Layout, device: Device, assumed: FailureAssumptions) -> tuple[int, float]:
    """Return the number of machines of a layout, and the mean seconds between two failures of one machine."""
    node_size = min(device.node_size, layout.world_size)
    return layout.world_size // node_size, assumed.device_hours * _HOUR / node_size


def state_bytes(prediction: Prediction) -> float:
    """Return the bytes of a checkpoint, if all stages were as large as the fullest one."""
    layout, memory = prediction.layout, prediction.memory
    copies = layout.num_shards if layout.zero_stage == 3 else 1
    offloaded = memory.host if layout.offloads else 0.0
    states = memory.parameters * copies + (memory.optimizer + offloaded) * layout.num_shards
    return layout.tp_size * layout.pp_size * states


def save_seconds(prediction: Prediction, assumed: FailureAssumptions) -> float:
    """Return the seconds to write a checkpoint, or to read it."""
    return state_bytes(prediction) / (assumed.storage * prediction.layout.world_size)


def copy_seconds(prediction: Prediction, device: Device) -> float:
    """Return the seconds in which a rank sends its optimizer states to a neighbour, or reads them back."""
    return (prediction.memory.optimizer + prediction.memory.host) / device.between.bandwidth


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


def _mean_speed(layout: Layout, device: Device, machines: int, repair: float, uptime: float) -> float:
    """Return the mean of `speed_of` if each machine is repaired for a share of its time."""
    speed, away = speed_of(layout, device), repair / (repair + uptime)

    def chance(out: int) -> float:  # of the binomial distribution
        ways = lgamma(machines + 1) - lgamma(out + 1) - lgamma(machines - out + 1)
        return exp(ways + out * log(away) + (machines - out) * log1p(-away))

    return sum(chance(out) * speed(machines - out) for out in range(machines + 1))


def to_text(results: Mapping[str, Goodput], machines: int, between: float) -> str:
    """Format the goodput of each way as a table; `between` is the mean of seconds between failures."""
    rows = [("with failures", "goodput", "checkpoint every")]
    rows += [(name, f"{100 * each.useful:.1f} %", duration(each.interval)) for name, each in results.items()]
    lines = [f"{name:<38}{useful:<9}{interval}" for name, useful, interval in rows]
    plural = "s" if machines > 1 else ""
    return "\n".join([f"a failure every {duration(between)} on {machines} machine{plural}", "", *lines])


def duration(seconds: float) -> str:
    """Format a time in its largest unit."""
    for unit, size in (("d", DAY), ("h", _HOUR), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
