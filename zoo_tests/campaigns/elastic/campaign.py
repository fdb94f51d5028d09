"""Random kills of an elastic job on two "machines"; every loss is compared with that of the undisturbed run.

    python -m zoo_tests.campaigns.elastic --kills 100 --seed 1 [--small] [--log kills.jsonl] [--output page.md]

The job is a Llama in fp64 under tp 2 x pp 2, pp 4 and tp 2 x dp 2 in turn (`zoo_tests/elastic/job.py`), or with
`--small` replicas of a classifier under ZeRO stages in turn, which start without transformers. It saves a checkpoint on
disk and changes its layout every few steps. What is killed, and how, is drawn (`kills.py`). A kill is survived if the
job makes a new step; the losses are compared at the end of each job, which has five kills. With `--log`, a campaign
that was interrupted goes on after the last job that has ended, and the page is about all kills in the log.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zoo_tests.campaigns.elastic.kills import Kill
from zoo_tests.campaigns.elastic.page import page
from zoo_tests.elastic import driver, small_job
from zoo_tests.elastic.driver import ElasticJob, lines_of, wrong_steps
from zoo_tests.harness.environment import environment_of_a_job

_KILLS_OF_A_JOB = 5  # rounding that differs between layouts grows with the steps
_STEPS_OF_A_KILL = 400  # more than are done until the next kill
_TOLERANCE = 1e-9
_OPTIONS = ("--rejoin-after", "1", "--max-restarts", "20", "--rdzv-conf", "last_call_timeout=300")
_EVERY = {"JOB_SAVE_EVERY": "7", "JOB_RELAYOUT_EVERY": "10"}


@dataclass(frozen=True)
class Campaign:
    """Kills parts of jobs.

    Attributes:
        small: whether the job is the one without transformers.
        seed: of the choice of kills.
        limit_s: of every wait.
        folder: for files of jobs.
    """

    small: bool
    seed: int
    limit_s: float
    folder: Path

    @property
    def name(self) -> str:
        """Name of the job."""
        return "small" if self.small else "llama"

    def run(self, numbers: list[int]) -> Iterator[list[Kill]]:
        """Kill for each number; yield the kills of each job once its losses have been compared."""
        while numbers:
            chunk = numbers[0] // _KILLS_OF_A_JOB
            part = [number for number in numbers if number // _KILLS_OF_A_JOB == chunk]
            kills = self._of_one_job(part, has_one_rendezvous=chunk % 2 == 1)
            numbers = numbers[len(kills) :]  # a job that does not survive a kill is followed by another
            yield kills

    def _of_one_job(self, numbers: list[int], has_one_rendezvous: bool) -> list[Kill]:
        job = ElasticJob(
            self.folder / f"{self.name}-{self.seed}-{numbers[0]}",
            _STEPS_OF_A_KILL * len(numbers),
            (2, 2),
            _OPTIONS,
            script=Path(small_job.__file__) if self.small else driver.JOB,
            limit_s=self.limit_s,
            rendezvous=1 if has_one_rendezvous else None,
            environment=_EVERY,
        )
        kills = []
        try:
            job.wait_for_step(3)
            for number in numbers:
                kills.append(Kill(self.name, self.seed, number))
                try:
                    kills[-1].strike(job, has_one_rendezvous)
                    self._recover(job, number)
                except (AssertionError, OSError) as error:
                    kills[-1].problem = str(error)[-3000:]
                _say(kills[-1])
                if kills[-1].problem:
                    break
        finally:
            job.close()
        problems = wrong_steps(job, self._expected(_last_step(job)), _TOLERANCE)
        kills[-1].problem += "; ".join(problems[:3])
        return kills

    def _recover(self, job: ElasticJob, number: int) -> None:
        """Start lost machines again, and wait until all ranks have trained for a few steps."""
        for machine, agent in enumerate(job.agents):
            if agent.poll() is not None:
                job.agents[machine] = job.start(machine)
        job.wait(lambda: job.num_ranks() == 4, "round of all ranks")
        job.wait_for_step(_last_step(job) + random.Random(number).randint(1, 6))

    def _expected(self, steps: int) -> list[float]:
        """Losses of the undisturbed run: plain torch, or the unsharded job in one process."""
        if self.small:
            return small_job.plain_losses(steps)
        with tempfile.TemporaryDirectory(dir=self.folder) as plain:
            command = [sys.executable, str(driver.JOB), plain, str(steps), "0"]
            subprocess.run(command, env=environment_of_a_job(JOB_LAYOUTS="[{}]", OMP_NUM_THREADS="1"), check=True)
            return [loss for _, loss, _ in lines_of(Path(plain) / "losses")]


def _last_step(job: ElasticJob) -> int:
    return max((step for step, _, _ in job.losses()), default=0)


def _say(kill: Kill) -> None:
    parts = " ".join(f"{name} {value:.1f}" for name, value in kill.parts.items())
    outcome = f"FAILED: {kill.problem}" if kill.problem else f"{kill.seconds:.1f} s ({parts}), {kill.layout}"
    place = " (inside)" if kill.is_during else ""
    sys.stderr.write(f"{kill.number}: {kill.kind}{place}, {kill.victim}: {outcome}\n")


def main() -> None:
    """Run the campaign; exit with 1 if a kill was not survived, or a loss is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of every wait")
    parser.add_argument("--log", type=Path, help="append kills as JSON lines, and leave out those that are there")
    parser.add_argument("--output", type=Path, help="write the page")
    options = parser.parse_args()
    done = [] if options.log is None else [Kill(**each) for each in lines_of(options.log)]
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(options.small, options.seed, options.limit, Path(folder))
        known = {kill.number for kill in done if (kill.job, kill.seed) == (campaign.name, options.seed)}
        for kills in campaign.run([number for number in range(options.kills) if number not in known]):
            done += kills
            if options.log is not None:
                with open(options.log, "a", encoding="utf-8") as file:
                    file.writelines(json.dumps(kill.to_json()) + "\n" for kill in kills)
    text = page(done, os.cpu_count() or 1)
    print(text)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    raise SystemExit(int(any(kill.problem for kill in done)))
