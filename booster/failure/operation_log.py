"""Log of the main thread's operations, readable by other threads and by the other ranks of this machine.

A call costs a microsecond: it writes a few bytes to a memory page that the other ranks of the machine have mapped, and
can still read after this process has ended.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable

from booster.failure.collective_counts import CollectiveCounts

_ENDED, _SPOKEN, _CODE, _TOLD = 0, 1, 2, 3  # bytes of the page: flags, and the exit code
_PHRASE, _PLACE, _BATCH = slice(64, 512), slice(512, 1024), slice(1024, 3072)
_SIZE = mmap.PAGESIZE
_KEPT_POINTS = 4096


class SharedStatus:
    """Memory page that a rank shares with the others of its machine; freed when the last process ends.

    Args:
        path: path of another rank's page under /proc; None to create this rank's own page.
    """

    def __init__(self, path: str | None = None) -> None:
        self.descriptor = os.memfd_create("booster") if path is None else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if path is None:
            os.ftruncate(self.descriptor, _SIZE)
        self._map = mmap.mmap(self.descriptor, _SIZE)

    @property
    def ended(self) -> bool:
        """Whether the rank's script has ended."""
        return self._map[_ENDED] == 1

    @property
    def exit_code(self) -> int:
        """Exit code that the rank's script passed to `sys.exit` at its end, else 0."""
        return self._map[_CODE]

    def set_ended(self, exit_code: int = 0) -> None:
        """Record that the rank's script has ended, with the lowest 8 bits of its exit code."""
        self._map[_CODE] = exit_code & 0xFF
        self._map[_ENDED] = 1

    @property
    def got_sigterm(self) -> bool:
        """Whether the rank got SIGTERM, as all ranks of a job do that is to end."""
        return self._map[_TOLD] == 1

    def set_got_sigterm(self) -> None:
        """Record that the rank got SIGTERM."""
        self._map[_TOLD] = 1

    def claim_report(self) -> bool:
        """Return True to the first process that calls this: only that process prints the failure."""
        try:
            os.lockf(self.descriptor, os.F_LOCK, 0)
            first = self._map[_SPOKEN] == 0
            self._map[_SPOKEN] = 1
            os.lockf(self.descriptor, os.F_ULOCK, 0)
        except OSError:
            return True
        return first

    @property
    def phrase(self) -> str:
        """Current operation, such as `in booster.execute_pipeline (call 3)`."""
        return self._read(_PHRASE)

    @phrase.setter
    def phrase(self, text: str) -> None:
        self._write(_PHRASE, text)

    @property
    def place(self) -> str:
        """Where the main thread has been blocked; empty if it is not."""
        return self._read(_PLACE)

    @place.setter
    def place(self, text: str) -> None:
        self._write(_PLACE, text)

    @property
    def batch(self) -> str:
        """Batch of the current pass through a model, as `Operations.begin_batch` writes it; empty before the first."""
        return self._read(_BATCH)

    @batch.setter
    def batch(self, text: str) -> None:
        self._write(_BATCH, text)

    def _read(self, where: slice) -> str:
        return self._map[where].partition(b"\0")[0].decode(errors="replace")

    def _write(self, where: slice, text: str) -> None:
        room = where.stop - where.start
        self._map[where] = text.encode()[: room - 1].ljust(room, b"\0")


class Operations:
    """Log of the operations that the main thread has called and is in.

    Attributes:
        calls, completed: how often each operation was started, and completed without an error.
        counts: reads the numbers of collectives that this rank has issued.
        points: (call number, counts at its end) of the latest `optimizer.step` calls.
    """

    def __init__(self) -> None:
        self.page = SharedStatus() if hasattr(os, "memfd_create") else None
        self.calls: dict[str, int] = {}
        self.completed: dict[str, int] = {}
        self.counts = CollectiveCounts()
        self.points: deque[tuple[int, dict[str, int]]] = deque(maxlen=_KEPT_POINTS)
        self._inside: list[str] = []
        self._passes = 0
        self._say("before its first operation")

    @property
    def current(self) -> tuple[str, int]:
        """Innermost operation and its call number; ("", 0) outside of any operation."""
        inside = self._inside[-1:]
        return (inside[0], self.calls[inside[0]]) if inside else ("", 0)

    @property
    def phrase(self) -> str:
        """Description of the current operation, for messages."""
        return self._phrase

    def enter(self, operation: str) -> None:
        """Record that the main thread starts an operation; ignored in other threads."""
        if threading.current_thread() is not threading.main_thread():
            return
        number = self.calls[operation] = self.calls.get(operation, 0) + 1
        self._inside.append(operation)
        self._say(f"in {operation} (call {number})")

    def leave(self, operation: str, well: bool, count: Callable[[], dict[str, int]] | None = None) -> None:
        """Record that the main thread ends an operation; ignored in other threads.

        Args:
            operation: operation that ends.
            well: whether it completed without an error.
            count: returns the counts to record in `points`, for an operation after which they agree on all ranks.
        """
        if threading.current_thread() is not threading.main_thread() or not self._inside:
            return
        self._inside.pop()
        if well:
            self.completed[operation] = self.completed.get(operation, 0) + 1
            if count is not None:
                self.points.append((self.calls[operation], count()))
        outer, number = self.current
        self._say(f"in {outer} (call {number})" if outer else f"after {operation} (call {self.calls[operation]})")

    def begin_batch(self, replica: int, shapes: dict[str, list[int]]) -> None:
        """Record that a pass through a model begins, with the replica's number and the shapes of its batch."""
        if self.page is not None and threading.current_thread() is threading.main_thread():
            self._passes += 1
            self.page.batch = json.dumps([self._passes, replica, shapes])

    def _say(self, phrase: str) -> None:
        self._phrase = phrase
        if self.page is not None:
            self.page.phrase = phrase
