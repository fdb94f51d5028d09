"""Starting `job.py` as a user would, and looking at what came of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from zoo_tests.harness.environment import environment_of_a_job
from zoo_tests.harness.ranks import under_load

JOB = Path(__file__).with_name("job.py")
_LIMIT_S = 240  # other tests have the processors
_POLL_S = 0.02


@dataclass(frozen=True)
class Ended:
    """What a job left behind.

    Attributes:
        code: exit code of the process that was started.
        out, err: all that the job wrote.
        happened: when what was asked for happened, as wall-clock time; 0 if it did not.
        seconds: from then to the end of the last rank.
    """

    code: int
    out: str
    err: str
    happened: float
    seconds: float


class Started:
    """A running Python process; its output goes to files, so that it can be read at any time."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read as long as this object lives)
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=self._out,
            stderr=self._err,
            env=environment_of_a_job(**environment),
            # A shell starts what it puts in the background with Ctrl-C ignored, and so would be the job's.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def interrupt(self) -> None:
        """Ctrl-C, once something has happened."""
        self._wait(lambda: self._happened() > 0)
        self.process.send_signal(signal.SIGINT)

    def ended(self) -> Ended:
        """Wait for the end of all ranks, then for that of the process."""
        happened, at = 0.0, 0.0
        try:
            self._wait(lambda: self._happened() > 0 or self.process.poll() is not None)
            happened = self._happened()
            self._wait(lambda: not any(_runs(pid) for pid in self._ranks()))
            at = time.time()
            self.process.wait(under_load(_LIMIT_S))
        finally:
            self._end_all()
        out, err = self._read(self._out), self._read(self._err)
        return Ended(self.process.returncode, out, err, happened, at - happened)

    def killed(self) -> Ended:
        """End it now, however far it is."""
        self._end_all()
        return self.ended()

    def _wait(self, what: Callable[[], bool]) -> None:
        limit = time.monotonic() + under_load(_LIMIT_S)
        while not what():
            assert time.monotonic() < limit, f"the job hangs:\n{self._read(self._out)}\n{self._read(self._err)}"
            time.sleep(_POLL_S)

    def _happened(self) -> float:
        times = re.findall(r"happens at ([\d.]+)\n", self._read(self._out))
        return float(times[0]) if times else 0.0

    def _ranks(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"pid (\d+)", self._read(self._out))]

    def _end_all(self) -> None:
        for pid in (*self._ranks(), self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        self.process.wait()

    @staticmethod
    def _read(file: tempfile._TemporaryFileWrapper) -> str:
        # Not seek and read: the job's writes go through the same file position.
        return os.pread(file.fileno(), 2**20, 0).decode()


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def start_job(happening: str, where: str, num_ranks: int = 2) -> Started:
    """`booster run` of the job."""
    return Started("-m", "booster", "run", "--nproc-per-node", str(num_ranks), str(JOB), happening, where)


def start_alone(happening: str, where: str = "0", **environment: str) -> Started:
    """The job as a plain script."""
    return Started(str(JOB), happening, where, **environment)
