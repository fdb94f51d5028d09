"""Kills of parts of an elastic job, and how long it takes until the next step."""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from zoo_tests.elastic.driver import ElasticJob
from zoo_tests.elastic.loop import RELAYOUT, SAVE

PARTS = ("detect", "re-form", "start", "plan", "move", "first step")
SNAPSHOT = "snapshot"
STORE, ONLY_STORE = "store", "only store"
# Kind -> what it is.
KINDS = {
    "rank": "SIGKILL of a rank",
    "stop": "SIGSTOP of a rank",
    "two": "two ranks in sequence",
    "machine": "SIGKILL of a machine without the rendezvous",
    STORE: "SIGKILL of the machine with the rendezvous",
    ONLY_STORE: "the same, and no other machine may hold it: it returns",
    SNAPSHOT: "SIGKILL around a snapshot",
    SAVE: "SIGKILL during a save on disk",
    RELAYOUT: "SIGKILL during a relayout",
}
_USUAL_S = 0.3  # that a save or a relayout takes, before one was seen
_DRAWN = [kind for kind in KINDS if kind != ONLY_STORE]  # which a job has in the place of "store"


@dataclass
class Kill:
    """One kill.

    Attributes:
        job: name of the job.
        seed, number: of the choice.
        kind: key of `KINDS`.
        victim: "rank 2" or "machine 0".
        is_during: whether it struck before the victim's save or relayout was over.
        seconds: from the last signal to the end of the next step.
        parts: the same, by part.
        layout: with which the job went on.
        plan_s: seconds that the planner took for it, ahead of the kill; None if it is not from a plan.
        problem: what went wrong.
    """

    job: str
    seed: int
    number: int
    kind: str = ""
    victim: str = ""
    is_during: bool = False
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    layout: str = ""
    plan_s: float | None = None
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def strike(self, job: ElasticJob, has_one_rendezvous: bool) -> None:
        """Kill, and wait for the next step."""
        draw = random.Random(f"{self.job}/{self.seed}/{self.number}")
        self.kind = draw.choice(_DRAWN)
        if self.kind == STORE and has_one_rendezvous:
            self.kind = ONLY_STORE
        time.sleep(draw.uniform(0, 0.3))
        at = _STRIKES[self.kind](self, job, draw)
        number = job.round()
        job.wait(lambda: _first_step(job, at, number) is not None, "next step")
        self._look_back(job, at, _first_step(job, at, number))

    def _look_back(self, job: ElasticJob, at: float, end: float) -> None:
        """Split the time between a kill and the next step at the last event of each kind."""
        events = [each for each in job.events() if at <= each["time"] <= end]
        times = [at]
        for names in (("detected", "stop"), ("run",), ("started",), ("planned",), ("moved",)):
            found = [each["time"] for each in events if each["event"] in names and times[-1] <= each["time"]]
            times.append((min if "stop" in names else max)(found, default=times[-1]))
        times.append(end)
        self.seconds = end - at
        self.parts = {name: times[index + 1] - times[index] for index, name in enumerate(PARTS)}
        planned = [each for each in events if each["event"] == "planned"][-1:]
        for each in planned:
            self.layout, self.plan_s = each["layout"], each.get("plan_s")

    # ----- kinds; each returns when it struck last -----

    def _rank(self, job: ElasticJob, draw: random.Random, number: int = signal.SIGKILL) -> float:
        rank = draw.randrange(job.num_ranks())
        self.victim = f"rank {rank}"
        # Right after another kill, the newest round may be one whose ranks are ending.
        job.wait(lambda: psutil.pid_exists(job.pid_of(rank)), f"process of {self.victim}")
        return job.signal_rank(rank, number)

    def _stop(self, job: ElasticJob, draw: random.Random) -> float:
        return self._rank(job, draw, signal.SIGSTOP)

    def _two(self, job: ElasticJob, draw: random.Random) -> float:
        number = job.round()
        self._rank(job, draw)
        job.wait(lambda: job.round() > number and job.pid_of(0) > 0, "second round")
        time.sleep(draw.uniform(0, 1.0))
        return self._rank(job, draw)

    def _machine(self, job: ElasticJob, draw: random.Random) -> float:
        number = 1 - job.store_machine()
        self.victim = f"machine {number}"
        return job.kill_machine(number)

    def _store(self, job: ElasticJob, draw: random.Random) -> float:
        number = job.store_machine()
        self.victim = f"machine {number}"
        return job.kill_machine(number)

    def _only_store(self, job: ElasticJob, draw: random.Random) -> float:
        at = self._store(job, draw)
        job.agents[0] = job.start(0)
        return at

    def _snapshot(self, job: ElasticJob, draw: random.Random) -> float:
        before = len(job.losses())
        job.wait(lambda: len(job.losses()) > before, "next step")  # its snapshot follows
        return self._rank(job, draw)

    def _inside(self, job: ElasticJob, draw: random.Random) -> float:
        """Kill a rank, or its machine, at a random time after it has begun a save or a relayout."""
        rank = draw.randrange(4)
        usual_s = _usual_s(job, self.kind)
        before = job.begun(rank, self.kind)
        job.wait(lambda: job.begun(rank, self.kind) > before, self.kind)
        time.sleep(draw.uniform(0, 0.5) * usual_s)
        if draw.random() < 0.7:
            self.victim = f"rank {rank}"
            at = job.signal_rank(rank)
        else:
            number = job.machine_of(rank)
            self.victim = f"machine {number}"
            at = job.kill_machine(number)
        self.is_during = job.is_inside(rank, self.kind)
        return at


_STRIKES: dict[str, Callable[[Kill, ElasticJob, random.Random], float]] = {
    "rank": Kill._rank,
    "stop": Kill._stop,
    "two": Kill._two,
    "machine": Kill._machine,
    STORE: Kill._store,
    ONLY_STORE: Kill._only_store,
    SNAPSHOT: Kill._snapshot,
    SAVE: Kill._inside,
    RELAYOUT: Kill._inside,
}


def _usual_s(job: ElasticJob, name: str) -> float:
    """Median of the seconds that saves, or changes of the layout, of this job took."""
    begun: dict[int, float] = {}
    found = []
    for rank, _, each, is_over, at in job.marks():
        if each == name and not is_over:
            begun[rank] = at
        elif each == name and rank in begun:
            found.append(at - begun.pop(rank))
    return statistics.median(found) if found else _USUAL_S


def _first_step(job: ElasticJob, at: float, number: int) -> float | None:
    """Time of the first step after `at` in a round after `number`."""
    found = [
        each["time"]
        for each in job.events()
        if each["event"] == "first_step" and each["time"] > at and each["round"] > number
    ]
    return min(found, default=None)
