"""The ranks of this machine: started by the fork server, watched, ended, and the memory that they leave."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_STOPPED_S = 3.0  # a rank that a signal has stopped for longer is killed


class LocalRanks:
    """Ranks of one round on this machine, each in a place, which is its local rank.

    Args:
        argv: the script, or a module's name, and its arguments.
        is_module: whether `argv` begins with the name of a module.
        statuses: folder for the wait statuses of ranks that have ended.

    Attributes:
        pids: place -> process that runs.
        ended: place -> wait status, of ranks that have ended in this round.
        got_sigterm: whether this round's ranks were told to end.
        is_ready: whether the fork server has imported what it was first asked to.
    """

    def __init__(self, argv: Sequence[str], is_module: bool, statuses: Path) -> None:
        self._argv, self._is_module, self._statuses = list(argv), is_module, statuses
        self.pids: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.got_sigterm = self.is_ready = False
        self._received = b""
        self._stopped_since: dict[int, float] = {}
        self._is_starting = False
        self._connect()

    def _connect(self) -> None:
        """Start a fork server."""
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "booster.elastic.fork_server", str(theirs.fileno()), str(self._statuses)],
                pass_fds=[theirs.fileno()],
            )

    def start(self, environments: Mapping[int, Mapping[str, str]]) -> None:
        """Start a rank in each place."""
        self.poll()
        self.ended, self._is_starting, self.got_sigterm = {}, True, False
        if self._server.poll() is not None:  # it was killed
            self._connect()
        self._send({"start": environments, "argv": self._argv, "is_module": self._is_module})

    def import_modules(self, names: Sequence[str]) -> None:
        """Have the fork server import what ranks import, for the next round."""
        self._send({"import": list(names)})

    @property
    def running(self) -> bool:
        """Whether ranks are being started, or run."""
        return self._is_starting or bool(self.pids)

    def poll(self) -> None:
        """Take notice of ranks that have ended; kill those that are stopped."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while data := self._connection.recv(2**20):
                *lines, self._received = (self._received + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
        if self._server.poll() is not None and self.running:  # its end ends all ranks
            self.ended |= dict.fromkeys(self.pids, signal.SIGKILL)
            self.ended = self.ended or {0: signal.SIGKILL}
            self.pids, self._is_starting = {}, False
        self._kill_stopped()

    def signal(self, number: int) -> None:
        """Send a signal to all ranks."""
        self.got_sigterm = True
        self._send({"signal": number})

    def close(self) -> None:
        """End the fork server, which kills what still runs."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(2)
        self._server.kill()
        self._server.wait()

    def _take(self, message: dict) -> None:
        if "started" in message:
            self.pids = {int(place): pid for place, pid in message["started"].items()}
            self._is_starting = False
        elif "imported" in message:
            self.is_ready = True
        else:
            place, pid, status = message["ended"]
            if self.pids.get(int(place)) == pid:
                del self.pids[int(place)]
                self.ended[int(place)] = status

    def _kill_stopped(self) -> None:
        now = time.monotonic()
        for place, pid in self.pids.items():
            if _state(pid) != "T":
                self._stopped_since.pop(place, None)
            elif now - self._stopped_since.setdefault(place, now) > _STOPPED_S:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _send(self, request: dict) -> None:
        self._connection.setblocking(True)
        try:
            with contextlib.suppress(OSError):
                self._connection.sendall(json.dumps(request).encode() + b"\n")
        finally:
            self._connection.setblocking(False)


def _state(pid: int) -> str:
    """Return the state of a process, as in ps: "T" if a signal has stopped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


_PREFIX = "booster-elastic-"
_LOCK, _PIECES = "lock", "pieces"
_SHARED_MEMORY = Path("/dev/shm")


class MachineMemory:
    """A new directory; those of agents that were killed are removed.

    Args:
        parent: where it is created; None for the shared memory of the machine.
    """

    def __init__(self, parent: Path | None = None) -> None:
        if parent is None:
            usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)
            parent = _SHARED_MEMORY if usable else Path(tempfile.gettempdir())
        _remove_unowned(parent)
        new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
        self._lock = _lock(new)
        (new / _PIECES).mkdir()
        self.folder = new.rename(new.with_name(new.name[1:]))  # locked before others can find it

    def newest_snapshot(self) -> int:
        """Return the number of the newest snapshot of which this machine has a part; 0 if there is none."""
        names = os.listdir(self.folder / _PIECES)
        numbers = [name.partition(".")[0] for name in names if name.endswith(".json")]
        return max((int(number) for number in numbers if number), default=0)  # hidden files are being written

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def _lock(folder: Path) -> int | None:
    """Lock a directory until this process ends; return None if another process has locked it.

    In a directory that everyone writes to, others can plant links and directories with any name.

    Raises:
        OSError: it is no directory of this user alone.
    """
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(place)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(f"{folder} belongs to others")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(_LOCK, flags, 0o600, dir_fd=place)
    finally:
        os.close(place)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_unowned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = _lock(folder)
            if descriptor is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)
