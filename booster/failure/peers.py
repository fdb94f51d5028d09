"""Process state of the other ranks of this machine: running, stopped or ended, and how.

A process that has ended can be asked for its status only until its parent reaps it. `booster run` reaps a rank within
a fraction of a second, on a busy machine before other ranks look. So the launcher notes wait statuses in files.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from booster.failure.operation_log import SharedStatus

_STOPPED = "T"  # stopped by a signal; "t" is stopped by a debugger
_DEAD = ("Z", "X")
_STATE, _START_TIME = 0, 19  # fields of /proc/PID/stat after the command's name


def machine() -> str:
    """Return an identifier of this machine, equal for processes that see each other under /proc."""
    boot = _read("/proc/sys/kernel/random/boot_id")
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()}/{boot}/{namespace}"


@dataclass(frozen=True)
class Address:
    """Machine and process of a rank. The start time distinguishes a process from a later one with the same pid."""

    machine: str
    pid: int
    start_time: str
    page: int

    @classmethod
    def own(cls, page: SharedStatus | None) -> Address:
        """Return the address of this process."""
        fields = _stat(os.getpid())
        return cls(machine(), os.getpid(), fields[_START_TIME] if fields else "", page.descriptor if page else -1)


class Peer:
    """Another rank on this machine.

    Args:
        rank: the other rank.
        address: its machine and process.
    """

    def __init__(self, rank: int, address: Address) -> None:
        self.rank, self.address = rank, address
        self.page: SharedStatus | None = None
        self.handle: int | None = None
        self.stopped_since: float | None = None
        with contextlib.suppress(OSError, ValueError):
            self.page = SharedStatus(f"/proc/{address.pid}/fd/{address.page}")
        with contextlib.suppress(OSError, AttributeError):
            self.handle = os.pidfd_open(address.pid)

    @property
    def ended_well(self) -> bool:
        """Whether the rank's script has ended."""
        return self.page is not None and self.page.ended

    def got_sigterm(self, status: int | None) -> bool:
        """Return whether the process ended because of SIGTERM.

        Args:
            status: its wait status; None if it is unknown.
        """
        return (self.page is not None and self.page.got_sigterm) or (status or 0) & 0x7F == signal.SIGTERM

    def is_dead(self) -> bool:
        """Return whether the process has ended."""
        if self.handle is not None:
            poll = select.poll()
            poll.register(self.handle, select.POLLIN)
            return bool(poll.poll(0))
        fields = self._fields()
        return fields is None or fields[_STATE] in _DEAD

    def status(self) -> int | None:
        """Return the wait status of an ended process; None if it runs, or its parent has reaped it and noted none."""
        fields = self._fields()
        if fields is None:
            return noted(self.address.pid)
        return int(fields[-1]) if fields[_STATE] in _DEAD else None

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process."""
        fields = self._fields()
        return fields is not None and fields[_STATE] == _STOPPED

    def kill(self) -> None:
        """Send SIGKILL: a stopped process reacts to no other signal."""
        if self._fields() is not None:
            with contextlib.suppress(OSError):
                os.kill(self.address.pid, signal.SIGKILL)

    def phrase(self) -> str:
        """Describe what the rank was doing."""
        if self.page is None:
            return ""
        return f"{self.page.phrase}, {self.page.place}" if self.page.place else self.page.phrase

    def _fields(self) -> list[str] | None:
        fields = _stat(self.address.pid)
        return fields if fields and fields[_START_TIME] == self.address.start_time else None


class StoppedPeers:
    """Detector of ranks that are stopped while this one runs.

    If the whole job is suspended and resumed, the gap between two looks is too long, and all timers restart.

    Args:
        after_s: seconds that a rank must be stopped.
        longest_gap_s: longest gap between two looks; after a longer one, this rank was not running itself.
    """

    def __init__(self, after_s: float, longest_gap_s: float = 1.0) -> None:
        self.after_s, self.longest_gap_s = after_s, longest_gap_s
        self._looked_at = time.monotonic()

    def look(self, peers: list[Peer]) -> Peer | None:
        """Return the first rank that has been stopped for at least `after_s` seconds."""
        now = time.monotonic()
        interrupted = now - self._looked_at > self.longest_gap_s
        self._looked_at = now
        for peer in peers:
            if interrupted or not peer.is_stopped():
                peer.stopped_since = None
            elif peer.stopped_since is None:
                peer.stopped_since = now
            elif now - peer.stopped_since >= self.after_s:
                return peer
        return None


def _stat(pid: int) -> list[str] | None:
    line = _read(f"/proc/{pid}/stat")
    return line.rpartition(")")[2].split() or None


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


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
