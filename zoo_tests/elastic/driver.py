"""Starts `job.py` on one or several "machines" (agents with their ranks), ends parts of it, and looks at its losses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from zoo_tests.harness.environment import environment_of_a_job

JOB = Path(__file__).with_name("job.py")
_POLL_S = 0.02


class ElasticJob:
    """A running elastic job.

    Args:
        folder: for its checkpoints, losses and logs.
        steps: of the whole job.
        machines: places of each machine.
        options: more options of `booster run`.
        step_s: seconds that a step takes at least.
        limit_s: of every wait.
        script: what is run.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        machines: tuple[int, ...] = (4,),
        options: tuple[str, ...] = (),
        *,
        min_ranks: int = 2,
        max_ranks: int = 4,
        step_s: float = 0.1,
        limit_s: float = 120.0,
        script: Path = JOB,
    ) -> None:
        self.folder, self.steps, self.limit_s = folder, steps, limit_s
        self._arguments = [str(script), str(folder), str(steps), str(step_s)]
        ports = [_free_port() for _ in machines]
        self._options = ["--elastic", "--min-ranks", str(min_ranks), "--max-ranks", str(max_ranks), *options]
        self._options += ["--elastic-log", str(folder / "events")]
        if len(machines) > 1:
            self._options += ["--rdzv-endpoint", ",".join(f"127.0.0.1:{port}" for port in ports)]
        folder.mkdir(parents=True, exist_ok=True)
        self._log = open(folder / "log", "ab")  # noqa: SIM115 (as long as the job)
        self._places = machines
        self.agents: list[subprocess.Popen] = []
        for number in range(len(machines)):
            self.agents.append(self.start(number))

    def start(self, number: int) -> subprocess.Popen:
        """Start the agent of a machine."""
        command = [sys.executable, "-m", "booster", "run", *self._options]
        command += ["--nproc-per-node", str(self._places[number]), *self._arguments]
        environment = environment_of_a_job()
        return subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log, start_new_session=True)

    def losses(self) -> list[list[Any]]:
        """[step, loss, number of ranks] of all steps, repeated ones too."""
        return lines_of(self.folder / "losses")

    def events(self) -> list[dict[str, Any]]:
        """Events of agents and ranks."""
        return lines_of(self.folder / "events")

    def round(self) -> int:
        """Number of the newest round that has begun."""
        return max((each["round"] for each in self.events() if each["event"] == "run"), default=0)

    def pid_of(self, rank: int) -> int:
        """Process of a rank of the newest round."""
        found = [pid for number, each, pid in lines_of(self.folder / "pids") if each == rank and number == self.round()]
        return found[-1] if found else 0

    def num_ranks(self) -> int:
        """Number of ranks of the newest round."""
        return next((each["ranks"] for each in reversed(self.events()) if each["event"] == "run"), 0)

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is done."""
        self.wait(lambda: any(each[0] >= step for each in self.losses()), f"step {step}")

    def wait(self, what: Callable[[], bool], name: str) -> None:
        """Wait for something; fail if the job has ended before, or it takes too long."""
        until = time.monotonic() + self.limit_s
        while not what():
            over = all(agent.poll() is not None for agent in self.agents)
            assert not over, f"the job ended before {name}:\n{self.log()}"
            assert time.monotonic() < until, f"no {name}:\n{self.log()}"
            time.sleep(_POLL_S)

    def signal_rank(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Send a signal to a rank; return when."""
        os.kill(self.pid_of(rank), number)
        return time.time()

    def kill_machine(self, number: int) -> float:
        """End an agent with all of its processes at once; return when."""
        agent = psutil.Process(self.agents[number].pid)
        for process in [agent, *agent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.agents[number].wait()
        return time.time()

    def ended(self) -> int:
        """Wait for the end; return the exit code of the last agent that runs."""
        until = time.monotonic() + self.limit_s
        codes = []
        for agent in self.agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.1, until - time.monotonic()))
            codes.append(agent.returncode)
        self.close()
        assert None not in codes, f"the job hangs:\n{self.log()}"
        return max(code for code in codes if code >= 0)

    def close(self) -> None:
        """End what still runs."""
        for number, agent in enumerate(self.agents):
            if agent.poll() is None:
                self.kill_machine(number)
        self._log.close()

    def log(self) -> str:
        """All that agents and ranks have written."""
        return (self.folder / "log").read_text()


def wrong_steps(job: ElasticJob, expected: list[float], tolerance: float) -> list[str]:
    """What is wrong with the losses of a job: a step is missing, or any of its losses differs."""
    found: dict[int, list[float]] = {}
    for step, loss, _ in job.losses():
        found.setdefault(step, []).append(loss)
    problems = [f"step {step} is missing" for step in range(1, len(expected) + 1) if step not in found]
    for step, losses in found.items():
        problems += [
            f"step {step}: {loss} instead of {expected[step - 1]}"
            for loss in losses
            if abs(loss - expected[step - 1]) > tolerance
        ]
    return problems


def lines_of(path: Path) -> list[Any]:
    """Complete JSON lines of a file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
