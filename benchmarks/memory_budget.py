"""A budget of memory for the ranks of a run, enforced by a memory cgroup: who needs more is killed.

A cgroup counts what its processes allocate after they joined it, pages of files included. Those can be dropped or
written, so a run fails only if what it needs at one time does not fit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_LIMITS = {_V1: ("memory.limit_in_bytes", "memory.swappiness"), _V2: ("memory.max", "memory.swap.max")}


def cgroup_root() -> Path | None:
    """Return the folder in which this process can make memory cgroups; None if it can make none."""
    for root, (limit, _) in _LIMITS.items():
        probe = root / f"booster-probe-{os.getpid()}"
        with suppress(OSError):
            probe.mkdir()
            try:
                if os.access(probe / limit, os.W_OK):
                    return root
            finally:
                probe.rmdir()
    return None


@contextmanager
def memory_budget(size: int) -> Iterator[Path]:
    """Make a cgroup of `size` bytes, without swap, and yield its folder for `join`; its processes must end before.

    Raises:
        OSError: if no cgroup can be made.
    """
    root = cgroup_root()
    if root is None:
        raise PermissionError("no memory cgroup can be made here")
    folder = root / f"booster-budget-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    try:
        limit, swap = _LIMITS[root]
        (folder / limit).write_text(str(size))
        with suppress(OSError):  # a kernel without swap
            (folder / swap).write_text("0")
        yield folder
    finally:
        for _ in range(100):  # a killed process leaves with a delay
            with suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def join(folder: Path) -> None:
    """Put this process into a cgroup."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))


class ResidentPeak:
    """Measures how far the resident memory of this process rises, pages of files included."""

    def __init__(self) -> None:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # restarts the peak
        self._before = _status("VmRSS")

    def rise(self) -> int:
        """Return the rise since the start in bytes."""
        return _status("VmHWM") - self._before


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)
