"""Random kills of an elastic job on two "machines"; every loss is compared with that of the undisturbed run.

    python -m zoo_tests.campaigns.elastic --kills 100 --seed 1 [--small] [--output table.md]

The job is a Llama under tp 2 x pp 2 in fp64 (`zoo_tests/elastic/job.py`), or with `--small` replicas of a classifier,
which start without transformers. A kill is SIGKILL or SIGSTOP of a rank, SIGKILL of a whole machine (an agent with its
ranks, also the one that holds the rendezvous), two of these in sequence, or SIGKILL while a snapshot is written. A kill
is survived if the job makes a new step; the losses are compared at the end.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zoo_tests.elastic import driver, small_job
from zoo_tests.elastic.driver import ElasticJob, wrong_steps
from zoo_tests.harness.environment import environment_of_a_job

KINDS = ("rank", "stop", "machine", "two", "snapshot")
PARTS = ("detect", "re-form", "start and plan", "move", "first step")
_STEPS_OF_A_KILL = 80
_TOLERANCE = 1e-9


@dataclass
class Kill:
    """One kill, and the seconds until the next step, by part."""

    kind: str
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    problem: str = ""


class Campaign:
    """Kills parts of one job after the other.

    Args:
        seed: of the choice of kills.
        small: whether the job is the one without transformers.
        limit_s: of every wait.
    """

    def __init__(self, seed: int, small: bool, limit_s: float) -> None:
        self._random, self._limit_s = random.Random(seed), limit_s
        self._script = Path(small_job.__file__) if small else driver.JOB
        self._small = small

    def run(self, count: int, folder: Path) -> list[Kill]:
        """Kill `count` times; a job that does not survive is followed by another."""
        kills: list[Kill] = []
        while len(kills) < count:
            steps = _STEPS_OF_A_KILL * (count - len(kills))
            options = ("--rejoin-after", "1", "--max-restarts", "20", "--rdzv-conf", "last_call_timeout=300")
            job = ElasticJob(
                folder / f"job-{len(kills)}", steps, (2, 2), options, script=self._script, limit_s=self._limit_s
            )
            try:
                self._disturb(job, kills, count)
            finally:
                done = max((step for step, _, _ in job.losses()), default=0)
                job.close()
            problems = wrong_steps(job, self._expected(done, folder), _TOLERANCE)
            if problems:
                kills[-1].problem += "; ".join(problems[:3])
        return kills

    def _disturb(self, job: ElasticJob, kills: list[Kill], count: int) -> None:
        job.wait_for_step(3)
        while len(kills) < count:
            kill = Kill(self._random.choice(KINDS))
            kills.append(kill)
            try:
                self._kill(job, kill)
                for number, agent in enumerate(job.agents):
                    if agent.poll() is not None:
                        job.agents[number] = job.start(number)
                job.wait(lambda: job.num_ranks() == 4, "round of all ranks")
                job.wait_for_step(_last_step(job) + self._random.randint(1, 6))
            except (AssertionError, OSError) as error:
                kill.problem = str(error)[-2000:]
                sys.stderr.write(f"{len(kills)}: {kill.kind} FAILED: {kill.problem}\n")
                return
            parts = " ".join(f"{name} {value:.1f}" for name, value in kill.parts.items())
            sys.stderr.write(f"{len(kills)}: {kill.kind} {kill.seconds:.1f} s ({parts})\n")

    def _kill(self, job: ElasticJob, kill: Kill) -> None:
        """Kill, and wait for the next step; the time counts from the last kill."""
        rank = self._random.randrange(4)
        time.sleep(self._random.uniform(0, 0.3))
        if kill.kind == "machine":
            at = job.kill_machine(self._random.randrange(2))
        elif kill.kind == "stop":
            at = job.signal_rank(rank, signal.SIGSTOP)
        elif kill.kind == "snapshot":
            before = len(job.losses())
            job.wait(lambda: len(job.losses()) > before, "next step")  # its snapshot follows
            at = job.signal_rank(rank)
        else:
            at = job.signal_rank(rank)
        if kill.kind == "two":
            number = job.round()
            job.wait(lambda: job.round() > number and job.pid_of(0) > 0, "second round")
            time.sleep(self._random.uniform(0, 1.0))
            at = job.signal_rank(self._random.randrange(job.num_ranks()))
        number = job.round()
        job.wait(lambda: _first_step(job, at, number) is not None, "next step")
        found = _first_step(job, at, number)
        kill.seconds = found - at
        kill.parts = _parts(job, at, found)

    def _expected(self, steps: int, folder: Path) -> list[float]:
        """Losses of the undisturbed run: plain torch, or the unsharded job in one process."""
        if self._small:
            return small_job.plain_losses(steps)
        plain = folder / f"plain-{steps}"
        plain.mkdir()
        command = [sys.executable, str(driver.JOB), str(plain), str(steps), "0"]
        subprocess.run(command, env=environment_of_a_job(JOB_LAYOUT="{}"), check=True)
        return [loss for _, loss, _ in driver.lines_of(plain / "losses")]


def _last_step(job: ElasticJob) -> int:
    return max(step for step, _, _ in job.losses())


def _first_step(job: ElasticJob, at: float, number: int) -> float | None:
    """Time of the first step after `at` in a round after `number`."""
    found = [
        each["time"]
        for each in job.events()
        if each["event"] == "first_step" and each["time"] > at and each["round"] > number
    ]
    return min(found, default=None)


def _parts(job: ElasticJob, at: float, end: float) -> dict[str, float]:
    """Split the time between a kill and the next step at the last event of each kind."""
    times = [at]
    for names in (("detected", "stop"), ("run",), ("planned",), ("moved",)):
        found = [each["time"] for each in job.events() if each["event"] in names and times[-1] <= each["time"] <= end]
        times.append((min if "stop" in names else max)(found, default=times[-1]))
    return dict(
        zip(PARTS, (after - before for before, after in zip(times, [*times[1:], end], strict=True)), strict=True)
    )


def table(kills: Sequence[Kill]) -> str:
    """The kills by kind, with medians and the slowest of seconds."""
    rows = [f"| kill | survived | seconds | slowest | {' | '.join(PARTS)} |", "|---" * (4 + len(PARTS)) + "|"]
    for kind in KINDS:
        all_of_kind = [kill for kill in kills if kill.kind == kind]
        good = [kill for kill in all_of_kind if not kill.problem]
        if not good:
            rows += [f"| {kind} | 0 of {len(all_of_kind)} |" + " - |" * (2 + len(PARTS))] if all_of_kind else []
            continue
        seconds = [kill.seconds for kill in good]
        parts = " | ".join(f"{statistics.median(kill.parts[name] for kill in good):.1f}" for name in PARTS)
        median = f"{statistics.median(seconds):.1f} | {max(seconds):.1f}"
        rows.append(f"| {kind} | {len(good)} of {len(all_of_kind)} | {median} | {parts} |")
    return "\n".join(rows)


def main() -> None:
    """Run the campaign; exit with 1 if a kill was not survived, or a loss is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of every wait")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kills = Campaign(options.seed, options.small, options.limit).run(options.kills, Path(folder))
    text = table(kills)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    raise SystemExit(int(any(kill.problem for kill in kills)))
