"""A stand-in for SLURM: runs a batch script on "nodes" of this machine, with the commands and variables of SLURM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from zoo_tests.harness.environment import environment_of_a_job
from zoo_tests.harness.ranks import under_load

# What the real ones do with signals and exit codes: pass them to all tasks, and end all when one has failed.
_SRUN = """#!{python} -S
import os, signal, subprocess, sys, time

nodes, per_node = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
tasks = []
for task in range(nodes * per_node):
    own = {{
        "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(nodes * per_node), "SLURM_NTASKS": str(nodes * per_node),
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"], "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": os.environ["SLURM_TASKS_PER_NODE"],
        "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task % per_node), "SLURM_NODEID": str(task // per_node),
        "SLURMD_NODENAME": f"sim{{task // per_node + 1}}",
    }}
    tasks.append(subprocess.Popen(command, env={{**os.environ, **own}}))

def forward(number, frame):
    for each in tasks:
        if each.poll() is None:
            each.send_signal(number)

for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, forward)
worst = 0
while any(each.poll() is None for each in tasks):
    time.sleep(0.05)
    if not worst and any(each.poll() for each in tasks):
        worst = next(each.returncode for each in tasks if each.returncode)
        time.sleep(3)
        forward(signal.SIGTERM, None)
sys.exit(max((abs(each.returncode) for each in tasks), default=0))
"""
_SCONTROL = """#!/bin/sh
if [ "$1 $2" = "show hostnames" ]; then
    echo 127.0.0.1; echo 127.0.0.1
else
    echo "$@" >> "{log}"
fi
"""
_FIRST_JOB = 4711


class Cluster:
    """Two nodes.

    Attributes:
        job: number of the job, of which scripts make their port: another for each process of the tests.
        log: the calls of `scontrol` that change something, one a line.
    """

    def __init__(self, folder: Path, tasks_per_node: int) -> None:
        self.job = str(_FIRST_JOB + os.getpid())
        self.log, self._bin, self._tasks = folder / "scontrol.log", folder / "bin", tasks_per_node
        self._bin.mkdir()
        self._write("srun", _SRUN.format(python=sys.executable))
        self._write("scontrol", _SCONTROL.format(log=self.log))
        self._write("booster", f'#!/bin/sh\nexec "{sys.executable}" -m booster "$@"\n')
        self._write("python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')

    def run(self, script: Path, *arguments: object, notice: Path | None = None) -> tuple[int, str]:
        """Run a batch script to its end; return its exit code and what it wrote.

        Args:
            notice: send the signal of `--signal` when this file is there.
        """
        variables = {
            "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": self.job,
            "SLURM_JOB_NODELIST": "sim[1-2]",
            "SLURM_NNODES": "2",
            "SLURM_NTASKS": str(2 * self._tasks),
            "SLURM_NTASKS_PER_NODE": str(self._tasks),
            "SLURM_TASKS_PER_NODE": f"{self._tasks}(x2)",
            # A batch script has the variables of a first task, too.
            **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
        }
        output = self._bin.parent / "job.log"
        with output.open("w") as stream:
            job = subprocess.Popen(
                ["bash", str(script), *map(str, arguments)],
                env=environment_of_a_job(**variables),
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
            try:
                until = time.monotonic() + under_load(120)
                while notice is not None and not notice.exists() and job.poll() is None and time.monotonic() < until:
                    time.sleep(0.05)
                if notice is not None and job.poll() is None:
                    job.send_signal(signal.SIGUSR1)
                job.wait(max(1.0, until - time.monotonic()))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
        return job.returncode, output.read_text()

    def _write(self, name: str, text: str) -> None:
        (self._bin / name).write_text(text)
        (self._bin / name).chmod(0o755)
