"""Simulated runs of machines that fail: what `plugins/hybrid_parallel/planner/report.py` has in closed form."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import inf

from plugins.hybrid_parallel.planner.costs import Prediction
from plugins.hybrid_parallel.planner.device import Device
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.report import (
    DAY,
    DETECT,
    REFORM,
    FailureAssumptions,
    best_interval,
    copy_seconds,
    machines_of,
    save_seconds,
    speed_of,
)

_RUNS, _DAYS = 20, 54.0  # as long as the run of Llama 3 405B whose interruptions are published


@dataclass(frozen=True)
class Failures:
    """The machines of a run, and how often they fail (independently, with exponential times).

    Attributes:
        machines: number of machines.
        mean_uptime: mean seconds between two failures of one machine.
        repair: seconds until a machine that failed can be used again.
    """

    machines: int
    mean_uptime: float
    repair: float = 4 * 3600.0

    @property
    def between(self) -> float:
        """Mean seconds between two failures of any machine."""
        return self.mean_uptime / self.machines


@dataclass(frozen=True)
class Costs:
    """Seconds that a failure and the precautions cost; measure them in a run of one's own.

    Attributes:
        step: a step of training.
        save: training waits for a checkpoint.
        load: the state is read from storage.
        detect: until the failure is noticed.
        start: processes start on new machines, connect and warm up.
        reform: the processes that are left connect again and lay the model out, without a new process.
        copy: a step takes longer, because each rank sends its part of the states to a neighbour.
        fetch: a part of the states is read back from a neighbour.
    """

    step: float
    save: float
    load: float
    detect: float = DETECT
    start: float = 300.0
    reform: float = REFORM
    copy: float = 0.0
    fetch: float = 0.0


@dataclass(frozen=True)
class Goodput:
    """Shares of the time of a run, and the interval between checkpoints in seconds.

    Attributes:
        useful: training whose result remains, counted at the speed of all machines. This is the goodput.
        saving: checkpoints, and copies to neighbours.
        lost: training that is repeated.
        recovering: from a failure, or the return of a machine, to the first step.
        fewer: what is missing because fewer replicas train.
    """

    useful: float
    saving: float
    lost: float
    recovering: float
    fewer: float
    interval: float


@dataclass(frozen=True)
class Recovery:
    """How a run goes on after a failure.

    Attributes:
        name: for people.
        copies: neighbours have a copy of each part of the states, so that only a step is lost.
        shrinks: the machines that are left go on, and take the one that returns; otherwise a spare takes its place.
    """

    name: str
    copies: bool = False
    shrinks: bool = False


RECOVERIES = (
    Recovery("restart from disk"),
    Recovery("copies on neighbours, spare machines", copies=True),
    Recovery("copies on neighbours, fewer replicas", copies=True, shrinks=True),
)


def interval_of(recovery: Recovery, costs: Costs, failures: Failures) -> float:
    """Return the interval between checkpoints: those on disk are only read if a machine and its neighbour fail."""
    between = failures.between
    if recovery.copies:
        # The neighbour fails while the copy is made again.
        between = failures.between * failures.mean_uptime / recovery_seconds(recovery, costs)
    return min(best_interval(costs.save, between), DAY)


def recovery_seconds(recovery: Recovery, costs: Costs) -> float:
    """Return the seconds from a failure to the first step, if no other failure comes in between."""
    begins = costs.reform if recovery.shrinks else costs.start
    return costs.detect + begins + (costs.fetch if recovery.copies else costs.load)


def goodput(
    recovery: Recovery,
    costs: Costs,
    failures: Failures,
    speed: Callable[[int], float],
    interval: float | None = None,
    seed: int = 0,
) -> Goodput:
    """Simulate 20 runs of 54 days and return the mean shares of their time.

    Args:
        recovery: how the run goes on after a failure.
        costs: seconds of each part.
        failures: the machines, and how often they fail.
        speed: number of machines that work -> speed of training, 1 for all of them.
        interval: seconds of training between checkpoints; None for the best.
        seed: of the random times.
    """
    interval = interval_of(recovery, costs, failures) if interval is None else interval
    draw, sums = random.Random(seed), [0.0] * 5
    for _ in range(_RUNS):
        run = _Run(recovery, costs, failures, speed, interval, draw)
        run.until(_DAYS * DAY)
        sums = [total + part for total, part in zip(sums, run.parts(), strict=True)]
    shares = [total / (_RUNS * _DAYS * DAY) for total in sums]
    return Goodput(*shares, interval=interval)


class _Run:
    """One run: the seconds of each kind so far."""

    def __init__(
        self,
        recovery: Recovery,
        costs: Costs,
        failures: Failures,
        speed: Callable[[int], float],
        interval: float,
        draw: random.Random,
    ) -> None:
        self.recovery, self.costs, self.failures = recovery, costs, failures
        self.speed, self.interval, self.draw = speed, interval, draw
        self.now = self.since = 0.0  # since: seconds of the current cycle of training and saving
        self.resumes = 0.0  # when the recovery in progress ends
        self.useful = self.saving = self.lost = self.recovering = self.fewer = 0.0
        self.returns: list[float] = []  # when machines that failed are back
        self.failed_last = -inf

    def until(self, end: float) -> None:
        """Run to the time `end`."""
        while self.now < end:
            working = self.failures.machines - len(self.returns)
            fails = self.now + (self.draw.expovariate(working / self.failures.mean_uptime) if working else inf)
            returns = self.returns[0] if self.returns else inf
            self._train(min(fails, returns, end))
            if self.now == end:
                return
            if returns <= fails:
                heapq.heappop(self.returns)
                self._recover(self.costs.reform)
            else:
                self._fail(working)

    def parts(self) -> tuple[float, ...]:
        """Return the seconds of each kind."""
        return self.useful, self.saving, self.lost, self.recovering, self.fewer

    def _fail(self, working: int) -> None:
        # A second failure in the recovery from the first may take the neighbour that has the copy.
        pair = self.now < self.resumes and self.draw.random() < 1 / max(working - 1, 1)
        has_copy = self.recovery.copies and not pair
        speed = self.speed(working)
        if has_copy:
            undone = min(self.draw.random() * self.costs.step, self.interval) if self.now >= self.resumes else 0.0
        else:
            undone, self.since = min(self.since, self.interval), 0.0
        undone = min(undone * speed, self.useful)
        self.useful, self.lost = self.useful - undone, self.lost + undone
        if self.recovery.shrinks:
            heapq.heappush(self.returns, self.now + self.failures.repair)
        restored = self.recovery if has_copy else replace(self.recovery, copies=False)
        self._recover(recovery_seconds(restored, self.costs))

    def _recover(self, seconds: float) -> None:
        """Begin to recover; a recovery in progress begins again."""
        self.resumes = self.now + seconds

    def _train(self, end: float) -> None:
        """Go on to the time `end`: the rest of the recovery, then cycles of training and saving."""
        pause = max(min(end, self.resumes) - self.now, 0.0)
        self.recovering += pause
        seconds = end - self.now - pause
        self.now = end
        cycle = self.interval + self.costs.save
        count, since = divmod(self.since + seconds, cycle)
        trained = count * self.interval + min(since, self.interval) - min(self.since, self.interval)
        self.since = since
        copying = self.costs.copy / (self.costs.step + self.costs.copy) if self.recovery.copies else 0.0
        speed = self.speed(self.failures.machines - len(self.returns))
        self.saving += seconds - trained + trained * copying
        self.useful += trained * (1 - copying) * speed
        self.fewer += trained * (1 - copying) * (1 - speed)


def shares(result: Goodput) -> dict[str, float]:
    """Return the shares of time by name."""
    return {each.name: getattr(result, each.name) for each in fields(result) if each.name != "interval"}


def costs_of(prediction: Prediction, device: Device, assumed: FailureAssumptions) -> Costs:
    """Return the seconds that failures cost under a planned layout."""
    whole, to_neighbour = save_seconds(prediction, assumed), copy_seconds(prediction, device)
    return Costs(prediction.seconds.total, whole, whole, start=assumed.start, copy=to_neighbour, fetch=to_neighbour)


def failures_of(layout: Layout, device: Device, assumed: FailureAssumptions) -> Failures:
    """Return the machines of a layout; a failure of a device takes its whole machine."""
    return Failures(*machines_of(layout, device, assumed), assumed.repair_hours * 3600)


def goodputs(prediction: Prediction, device: Device, assumed: FailureAssumptions) -> dict[str, Goodput]:
    """Simulate a planned layout under failures: name of each way to recover -> shares of time."""
    costs, failures = costs_of(prediction, device, assumed), failures_of(prediction.layout, device, assumed)
    speed = speed_of(prediction.layout, device)
    return {each.name: goodput(each, costs, failures, speed) for each in RECOVERIES}
