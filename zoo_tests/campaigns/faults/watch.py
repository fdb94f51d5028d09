"""Runs `job.py` by `booster run` and takes the times: when the fault struck, was named, and all were gone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zoo_tests.harness.environment import environment_of_a_job

JOB = Path(__file__).with_name("job.py")
BOOSTER_RUN = ("-m", "booster", "run", "--nproc-per-node", "4")
_MARK = "BOOSTER_FAULT_JOB"
_POLL_S = 0.05
_START_S = 400.0
_LIMIT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Attributes:
        struck: when the fault happened, as wall-clock time; 0 if it did not.
        named_s: from then to the first line about it; infinite if there was none.
        gone_s: from that line (or the fault, without one) to the end of the last process; infinite if some remained.
        lines: of the job's error output that are about the failure.
        code: of the command.
        out, err: all that was written.
    """

    struck: float
    named_s: float
    gone_s: float
    lines: tuple[str, ...]
    code: int | None
    out: str
    err: str


class WatchedJob:
    """A running job, its output in files, its processes known by a mark in their environment.

    Args:
        arguments: of `job.py`, or another script's path first where `launcher` says so.
        launcher: arguments of Python before the script.
        script: what is run.
        environment: variables for the job.
    """

    def __init__(
        self,
        *arguments: str,
        launcher: Sequence[str] = BOOSTER_RUN,
        script: Path = JOB,
        **environment: str,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self._files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115 (read as long as this lives)
        self.process = subprocess.Popen(
            [sys.executable, *launcher, str(script), *arguments],
            stdout=self._files[0],
            stderr=self._files[1],
            env=environment_of_a_job(OMP_NUM_THREADS="1", **{_MARK: self.mark}, **environment),
        )

    def outcome(self) -> Outcome:
        """Wait until the fault has struck and all processes are gone; kill what is left a minute later."""
        try:
            self.wait_for(lambda: self.struck > 0 or self.process.poll() is not None, _START_S)
            self.wait_for(lambda: bool(self.lines) or not self.processes(), _LIMIT_S)
            named = time.time() if self.lines else float("inf")
            self.wait_for(lambda: not self.processes(), _LIMIT_S)
            gone = float("inf") if self.processes() else time.time()
        finally:
            self.kill()
        since = named if self.lines else self.struck
        return Outcome(
            self.struck, named - self.struck, gone - since, self.lines, self.process.returncode, self.out, self.err
        )

    def outcome_of_good_end(self, limit_s: float = _START_S) -> Outcome:
        """Wait for a job in which nothing is to go wrong."""
        self.wait_for(lambda: not self.processes(), limit_s)
        self.kill()
        return Outcome(self.struck, 0.0, 0.0, self.lines, self.process.returncode, self.out, self.err)

    def wait_for(self, what: Callable[[], bool], limit_s: float) -> bool:
        """Whether it came true in time."""
        until = time.monotonic() + limit_s
        while not what():
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        return True

    @property
    def struck(self) -> float:
        """When the fault happened, 0 before."""
        times = re.findall(r"strikes at ([\d.]+)\n", self.out)
        return float(times[0]) if times else 0.0

    @property
    def lines(self) -> tuple[str, ...]:
        """What was said of the failure."""
        return tuple(line for line in self.err.splitlines() if line.startswith("error"))

    @property
    def out(self) -> str:
        return self._read(0)

    @property
    def err(self) -> str:
        return self._read(1)

    def processes(self) -> list[int]:
        """All processes of the job that run, however far from the command they are."""
        # The command itself is counted without its mark: an environment reads as empty for a moment after exec.
        found = {self.process.pid} if self.process.poll() is None else set()
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdecimal() and self.mark.encode() in (path / "environ").read_bytes():
                    found.add(int(path.name))
        return sorted(found)

    def ranks(self) -> list[int]:
        """Those processes of the job that are ranks."""
        return [pid for pid in self.processes() if b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{pid}/environ").read_bytes()]

    def signal_all(self, number: int) -> None:
        """As the terminal does."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def kill(self) -> None:
        """End what is left of it."""
        self.signal_all(signal.SIGKILL)
        self.process.wait()

    def _read(self, which: int) -> str:
        # Not seek and read: the job's writes go through the same file position.
        return os.pread(self._files[which].fileno(), 2**22, 0).decode(errors="replace")
