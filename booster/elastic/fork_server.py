"""Fork server: a process that has imported what ranks need, and forks them (as Android's zygote does).

`python -m booster.elastic.fork_server DESCRIPTOR` takes requests as JSON lines from a socket:

- `{"start": {place: environment, ...}, "argv": [...], "is_module": bool}` forks a rank for each place;
- `{"signal": number}` sends a signal to all ranks;
- `{"import": [names]}` imports modules, so that later ranks need not; `module:name` also looks a name up in one, which
  lazy modules import only then.

It answers `{"imported": true}`, `{"started": {place: pid}}`, and for each rank `{"ended": [place, pid, wait status]}`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from booster.failure.peers import note_status

_PR_SET_PDEATHSIG = 1
_BASE = ("torch", "torch.distributed", "numpy")
_LAST = ""  # ends the names of a request


@dataclass(frozen=True)
class RankRequest:
    """What a forked process is to run."""

    environment: dict[str, str]  # all its environment variables
    argv: list[str]  # the script, or a module's name, and its arguments
    is_module: bool  # whether `argv` begins with the name of a module

    def run(self) -> None:
        """Run the script as `python SCRIPT` would."""
        sys.argv[:] = self.argv
        if self.is_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(self.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(self.argv[0]).resolve().parent)
            runpy.run_path(self.argv[0], run_name="__main__")


class ForkServer:
    """Forks ranks on request.

    Args:
        statuses: folder for the wait statuses of ranks that have ended.
    """

    def __init__(self, connection: socket.socket, statuses: Path) -> None:
        self._connection, self._statuses = connection, statuses
        self._pids: dict[int, str] = {}
        self._received = b""
        self._to_import: list[str] = []
        self._ended, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> RankRequest | None:
        """Handle requests until the agent has gone; return what to run in each forked process, else None."""
        while True:
            ready, _, _ = select.select([self._connection, self._ended], [], [], 0 if self._to_import else None)
            if not ready:
                self._import_next()
            if self._ended in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._ended, 4096)
                self._reap()
            if self._connection in ready:
                data = self._connection.recv(2**20)
                if not data:
                    self._signal(signal.SIGKILL)
                    return None
                *lines, self._received = (self._received + data).split(b"\n")
                for line in lines:
                    forked = self._handle(json.loads(line))
                    if forked is not None:
                        return forked

    def _handle(self, request: dict[str, Any]) -> RankRequest | None:
        if "import" in request:
            self._to_import += [*request["import"], _LAST]
        elif "signal" in request:
            self._signal(request["signal"])
        else:
            started = {}
            for place, environment in request["start"].items():
                pid = os.fork()
                if pid == 0:
                    self._become_rank(environment)
                    return RankRequest(environment, request["argv"], request["is_module"])
                self._pids[pid] = place
                started[place] = pid
            self._answer({"started": started})
        return None

    def _import_next(self) -> None:
        """Import one module: requests to start ranks come first."""
        name = self._to_import.pop(0)
        if name != _LAST:
            import_one(name)
            return
        gc.collect()
        gc.freeze()  # pages of objects that live on stay shared with the forked processes
        self._answer({"imported": True})

    def _become_rank(self, environment: dict[str, str]) -> None:
        """Turn a forked process into what a new one would be."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()  # Ctrl-C reaches the agent alone
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self._connection.close()
        os.close(self._ended)
        os.close(self._wake)
        os.environ.clear()
        os.environ.update(environment)
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()

    def _signal(self, number: int) -> None:
        for pid in self._pids:  # not reaped yet, so no other process can have the number
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _reap(self) -> None:
        for pid, place in list(self._pids.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            note_status(self._statuses, pid)  # before the process is reaped, for the other ranks
            _, status = os.waitpid(pid, 0)
            del self._pids[pid]
            self._answer({"ended": [place, pid, status]})

    def _answer(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")


def import_one(name: str) -> None:
    """Import a module, unless it cannot be imported, or another has started threads, which a fork would lose."""
    module, _, attribute = name.partition(":")
    if (attribute or module not in sys.modules) and threading.active_count() == 1:
        with contextlib.suppress(Exception):  # a rank that needs it will say what is wrong
            getattr(importlib.import_module(module), attribute or "__name__")


def main() -> None:
    """Arguments: descriptor of the socket, folder for wait statuses."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    server = ForkServer(connection, Path(sys.argv[2]))
    for name in _BASE:
        import_one(name)
    rank = server.serve()
    if rank is not None:
        rank.run()


if __name__ == "__main__":
    main()
