"""Wait statuses of ranks, from the launcher that reaps them to the other ranks.

A process that has ended can be asked for its status only until its parent reaps it. `booster run` reaps a rank within
a fraction of a second; on a busy machine that is before other ranks look, and they could not say which signal it was.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

# Environment variable: a folder with a file for each process that has ended; its name is the pid.
STATUS_VARIABLE = "BOOSTER_WAIT_STATUSES"


def note_children(folder: Path) -> None:
    """Write the wait status of each child that ends to `folder`, before this process can reap it.

    The kernel sends SIGCHLD as soon as a child can be reaped, and Python handles it in the main thread. That one must
    reap children by looking from time to time, as torchrun's agent does; a blocking wait reaps a child first.
    """

    def note(*_: Any) -> None:
        for pid in _children():
            note_status(folder, pid)

    signal.signal(signal.SIGCHLD, note)


def note_status(folder: Path, pid: int) -> None:
    """Write the wait status of a child to `folder` if it has ended, and leave it to be reaped."""
    with contextlib.suppress(OSError):  # it was reaped meanwhile, or the folder is gone
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            is_exit = ended.si_code == os.CLD_EXITED
            (folder / str(pid)).write_text(str(ended.si_status << 8 if is_exit else ended.si_status))


def noted(pid: int) -> int | None:
    """Return the wait status that the launcher of this rank noted of a process; None if there is none."""
    folder = os.environ.get(STATUS_VARIABLE)
    if not folder:
        return None
    with contextlib.suppress(OSError, ValueError):
        return int((Path(folder) / str(pid)).read_text())
    return None


def _children() -> list[int]:
    """Return the pids of this process's children; several may have ended at one signal."""
    threads = Path("/proc/self/task").glob("*/children")
    return [int(pid) for thread in threads for pid in thread.read_text().split()]
