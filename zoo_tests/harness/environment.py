"""The environment of jobs that tests start as a user would."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# What would make a job of the tests part of another, or change what it prints.
_NOT_INHERITED = ("OMP_NUM_THREADS", "LOGLEVEL", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment_of_a_job(**own: str) -> dict[str, str]:
    """That of this process, without what belongs to a job that it may be part of, and with `own`."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return {**kept, "PYTHONPATH": str(REPOSITORY), **own}
