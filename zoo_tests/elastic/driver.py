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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from zoo_tests.harness.environment import environment_of_a_job
from zoo_tests.harness.ranks import under_load

JOB = Path(__file__).with_name("job.py")
_POLL_S = 0.005


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
        rendezvous: how many of the machines may hold the rendezvous, the first ones; None for all.
        environment: more variables of the job.
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
        rendezvous: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.steps, self.limit_s = folder, steps, limit_s
        self._environment = environment_of_a_job(**(environment or {}))
        self._arguments = [str(script), str(folder), str(steps), str(step_s)]
        self._ports = [free_port() for _ in machines]
        self._options = ["--elastic", "--min-ranks", str(min_ranks), "--max-ranks", str(max_ranks), *options]
        self._options += ["--elastic-log", str(folder / "events")]
        if len(machines) > 1:
            self._options += ["--rdzv-endpoint", ",".join(f"127.0.0.1:{port}" for port in self._ports[:rendezvous])]
        folder.mkdir(parents=True, exist_ok=True)
        self._log = open(folder / "log", "ab")  # noqa: SIM115 (as long as the job)
        self._files = {name: LinesOf(folder / name) for name in ("losses", "events", "pids", "marks")}
        self._places = machines
        self.agents: list[subprocess.Popen] = []
        for number in range(len(machines)):
            self.agents.append(self.start(number))

    def start(self, number: int) -> subprocess.Popen:
        """Start the agent of a machine."""
        command = [sys.executable, "-m", "booster", "run", *self._options]
        command += ["--nproc-per-node", str(self._places[number]), *self._arguments]
        return subprocess.Popen(
            command, env=self._environment, stdout=self._log, stderr=self._log, start_new_session=True
        )

    def losses(self) -> list[list[Any]]:
        """[step, loss, number of ranks] of all steps, repeated ones too."""
        return self._files["losses"].read()

    def events(self) -> list[dict[str, Any]]:
        """Events of agents and ranks."""
        return self._files["events"].read()

    def round(self) -> int:
        """Number of the newest round that has begun."""
        return max((each["round"] for each in self.events() if each["event"] == "run"), default=0)

    def pid_of(self, rank: int) -> int:
        """Process of a rank of the newest round."""
        newest = self.round()
        found = [pid for number, each, pid in self._files["pids"].read() if (number, each) == (newest, rank)]
        return found[-1] if found else 0

    def machine_of(self, rank: int) -> int:
        """Number of the machine on which a rank of the newest round runs."""
        ancestors = {each.pid for each in psutil.Process(self.pid_of(rank)).parents()}
        return next(number for number, agent in enumerate(self.agents) if agent.pid in ancestors)

    def num_ranks(self) -> int:
        """Number of ranks of the newest round."""
        return next((each["ranks"] for each in reversed(self.events()) if each["event"] == "run"), 0)

    def marks(self) -> list[list[Any]]:
        """[rank, round, name, whether it is over, time] of saves and changes of the layout."""
        return self._files["marks"].read()

    def begun(self, rank: int, name: str) -> int:
        """How often a rank of the newest round has begun this."""
        newest = self.round()
        return sum(mark[:4] == [rank, newest, name, False] for mark in self.marks())

    def is_inside(self, rank: int, name: str) -> bool:
        """Whether the newest that is known of a rank of the newest round is that it has begun this."""
        newest = self.round()
        found = next((mark for mark in reversed(self.marks()) if mark[:2] == [rank, newest]), None)
        return found is not None and found[2:4] == [name, False]

    def store_machine(self) -> int:
        """Number of the machine that holds the rendezvous."""
        ports = [int(each["store"].rpartition(":")[2]) for each in self.events() if each["event"] == "run"]
        return self._ports.index(ports[-1])

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is done."""
        self.wait(lambda: any(each[0] >= step for each in self.losses()), f"step {step}")

    def wait(self, what: Callable[[], bool], name: str) -> None:
        """Wait for something; fail if the job has ended before, or it takes too long."""
        until = time.monotonic() + under_load(self.limit_s)
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
        until = time.monotonic() + under_load(self.limit_s)
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


class LinesOf:
    """Complete JSON lines of a file that grows; what was read once is kept."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self._lines: list[Any] = []

    def read(self) -> list[Any]:
        """All lines that are complete by now."""
        if self._path.exists():
            with open(self._path, "rb") as file:
                file.seek(self._read)
                for line in file:
                    if line.endswith(b"\n"):
                        self._lines.append(json.loads(line))
                        self._read += len(line)
        return self._lines


def lines_of(path: Path) -> list[Any]:
    """Complete JSON lines of a file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
