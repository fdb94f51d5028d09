"""The environment of jobs that tests start as a user would."""

from __future__ import annotations

import os
from pathlib import Path

from zoo_tests.harness.ranks import DEVICE_VARIABLE

REPOSITORY = Path(__file__).resolve().parents[2]
_SITE = REPOSITORY / "zoo_tests" / "simcuda" / "site"
# What would make a job of the tests part of another, or change what it prints.
_NOT_INHERITED = ("OMP_NUM_THREADS", "LOGLEVEL", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment_of_a_job(**own: str) -> dict[str, str]:
    """That of this process, without what belongs to a job that it may be part of, and with `own`.

    Where tests run on the simulated CUDA device, so does the job.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    if os.environ.get(DEVICE_VARIABLE) == "simcuda":
        return {**kept, "PYTHONPATH": f"{_SITE}{os.pathsep}{REPOSITORY}", **own}
    return {**kept, "PYTHONPATH": str(REPOSITORY), **own}
