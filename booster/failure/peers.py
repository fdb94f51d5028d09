"""State of the other ranks: processes of this machine, and what ranks tell each other through the job's store.

A process that has ended can be asked for its status only until its parent reaps it. `booster run` reaps a rank within
a fraction of a second, on a busy machine before other ranks look. So the launcher notes wait statuses in files.

A store that hangs (its process is stopped) must not block the monitoring of the processes of this machine.

A script saves on the main process alone, as it does where each process has the whole model. The parts of the others are
then needed (`Requests`): a thread answers while their scripts wait elsewhere or have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from booster.failure.desync import DesyncDetector
from booster.failure.diagnosis import Failure
from booster.failure.operation_log import SharedStatus
from booster.logging import get_logger

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
        """Return whether the process ended because of SIGTERM; `status`: its wait status; None if it is unknown."""
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


Value = TypeVar("Value")
_logger = get_logger(__name__)
_POLL_S = 0.2
_CALL_TIMEOUT = timedelta(seconds=5)
# A store that has not answered for this long is asked, but its answer is not waited for: its machine may be lost.
_UNREACHABLE_S, _NO_WAIT_S = 4.0, 0.1
_NEWS, _FAILURE, _CLOSING = "news", "failure", "closing"
_SPEAKER, _SEEN_CLOSING = "speaker", "seen-closing"


class StoreClient(threading.Thread):
    """Thread that makes all calls to the store.

    Attributes:
        closing: whether the rank that hosts the store is about to end normally.
        lost_since: time at which the store was lost because its process has ended; None while it is available.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        super().__init__(name="booster-store", daemon=True)
        self.rank = rank
        self._store = store
        self._store.set_timeout(_CALL_TIMEOUT)
        self._requests: queue.SimpleQueue[tuple[Callable, Future] | None] = queue.SimpleQueue()
        self.failure: Failure | None = None
        self.closing = False
        self.lost_since: float | None = None
        self._answered_at = time.monotonic()
        self.periodic_tasks: list[Callable[[dist.Store], None]] = []  # run at each poll

    # ----- for other threads -----

    def ask(self, call: Callable[[dist.Store], Value], default: Value, timeout_s: float = 1.0) -> Value:
        """Run `call` on the store in the client's thread; return `default` if it fails or takes too long."""
        future: Future[Value] = Future()
        self._requests.put((call, future))
        is_unreachable = time.monotonic() - self._answered_at > _UNREACHABLE_S
        try:
            return future.result(_NO_WAIT_S if is_unreachable else timeout_s)
        except (RuntimeError, TimeoutError):
            return default

    def publish(self, failure: Failure) -> Failure:
        """Publish a failure unless one was published before; return the job's first failure."""
        if self.failure is None:
            self.failure = self.ask(lambda store: _publish(store, failure), failure)
        return self.failure

    def publish_here(self, failure: Failure) -> None:
        """Publish a failure from a periodic task, which runs in this thread."""
        if self.failure is None:
            self.failure = _publish(self._store, failure)

    def refresh(self) -> None:
        """Check the store for a failure now."""
        self.ask(lambda store: self._read_news() if store.check([_NEWS]) else None, None)

    def may_speak(self) -> bool:
        """Return True on one rank of the job, and on every rank if the store does not answer."""
        return self.lost_since is not None or self.ask(lambda store: store.add(_SPEAKER, 1) == 1, True)

    def announce_end(self, num_others: int, patience_s: float) -> None:
        """Tell the other ranks that losing the store is no failure; called by the rank that hosts the store."""

        def announce(store: dist.Store) -> int:
            store.set(_CLOSING, "1")
            store.set(_NEWS, "1")
            return store.add(_SEEN_CLOSING, 0)

        until = time.monotonic() + patience_s
        seen = self.ask(announce, num_others)
        while seen < num_others and time.monotonic() < until:
            time.sleep(0.05)
            seen = self.ask(lambda store: store.add(_SEEN_CLOSING, 0), num_others)

    def stop(self) -> None:
        """End the thread: the process would abort if it were in the store's C++ code at interpreter shutdown."""
        self.ask(lambda store: store.add(_SEEN_CLOSING, 1), 0)
        self._requests.put(None)
        self.join(2.0)

    # ----- the thread -----

    def run(self) -> None:
        """Answer requests and run the periodic tasks until the client is stopped."""
        next_look = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                request = self._requests.get(timeout=max(0.0, next_look - time.monotonic()))
                if request is None:
                    return
                self._answer(*request)
            # Also while requests keep coming: other ranks wait for the answers of the periodic tasks.
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + _POLL_S

    def _answer(self, call: Callable[[dist.Store], Any], future: Future) -> None:
        try:
            future.set_result(call(self._store))
        except Exception as error:
            future.set_exception(RuntimeError(str(error)))

    def _look(self) -> None:
        began = time.monotonic()
        try:
            if not self.closing and self._store.check([_NEWS]):
                self._read_news()
            self.lost_since, self._answered_at = None, time.monotonic()
        except (RuntimeError, OSError) as error:
            if not re.search("timed? ?out", str(error), re.IGNORECASE):
                self.lost_since = self.lost_since or began
            return
        for duty in self.periodic_tasks:
            try:
                duty(self._store)
            except Exception as error:  # the store is lost, or a process group is being destroyed
                _logger.debug("%s: %s", type(error).__name__, error)

    def _read_news(self) -> None:
        if self._store.check([_FAILURE]):
            self.failure = self.failure or Failure(**json.loads(self._store.get(_FAILURE)))
        if self._store.check([_CLOSING]) and not self.closing:
            self.closing = True
            self._store.add(_SEEN_CLOSING, 1)


def _publish(store: dist.Store, failure: Failure) -> Failure:
    first = store.compare_set(_FAILURE, "", json.dumps(asdict(failure)))
    store.set(_NEWS, "1")
    return Failure(**json.loads(first))


_REQUEST_POLL_S = 0.05
_LOOK_S = 1.0
_JOINED, _ALONE = b"joined", b"alone"


class Requests:
    """Requests and answers of this rank, over the job's store.

    Args:
        inquiries: tells what other ranks do.
    """

    def __init__(
        self, link: StoreClient, inquiries: DesyncDetector, rank: int, world_size: int, peers: Sequence[Peer]
    ) -> None:
        self.link, self.inquiries, self.rank, self.world_size = link, inquiries, rank, world_size
        self.peers = peers
        self.answers: list[Callable[..., Any]] = []  # in the same order on all ranks
        self._calls = self._asked = self._answered = 0
        self._has_ended = False
        link.periodic_tasks.append(self._look)

    def joins(self) -> bool:
        """Return whether all ranks take part in this call of rank 0, or of all; rank 0 waits for another."""
        while True:
            self._calls += 1
            key = f"call/{self._calls}"
            if self.rank > 0:
                if self._claim(key, _JOINED) == _JOINED:
                    return True
                continue  # a call of rank 0 alone
            next_look = time.monotonic() + _LOOK_S
            while not self.link.ask(lambda store, key=key: store.check([key]), False):
                time.sleep(_REQUEST_POLL_S)
                if time.monotonic() > next_look:
                    next_look = time.monotonic() + _LOOK_S
                    if self.link.ask(self.inquiries.others_wait, False, timeout_s=5.0):
                        return self._claim(key, _ALONE) == _JOINED
            return True

    def ask(self, number: int, *arguments: Any) -> list[Any]:
        """Call `answers[number]` on all ranks, here as well; return what they return, as plain data, in rank order."""
        self._asked += 1
        asked = self._asked
        self.link.ask(lambda store: store.set(f"asked/{asked}", json.dumps([number, arguments])), None)
        found = [self.answers[number](*arguments)]
        keys = [f"told/{asked}/{rank}" for rank in range(1, self.world_size)]
        while not self.link.ask(lambda store: store.check(keys), False):
            time.sleep(_REQUEST_POLL_S)
        return found + [json.loads(text) for text in self.link.ask(lambda store: store.multi_get(keys), [])]

    def linger(self) -> None:
        """Answer until all ranks have ended, or the job has failed."""
        self._has_ended = True  # a thread cannot begin any more
        ended = [f"ended/{rank}" for rank in range(self.world_size)]
        while self.link.failure is None and self.link.lost_since is None and not self.link.closing:
            if self.link.ask(lambda store: store.check(ended), False):
                return
            if len(self.peers) == self.world_size - 1 and all(peer.is_dead() for peer in self.peers):
                return
            if (request := self.link.ask(self._next, None)) is not None:
                self._answer(*request)
            time.sleep(_REQUEST_POLL_S)

    def _claim(self, key: str, value: bytes) -> bytes:
        """Set the kind of a call, unless it is set; return it."""
        return self.link.ask(lambda store: store.compare_set(key, "", value.decode()), _JOINED, timeout_s=5.0)

    def _look(self, store: dist.Store) -> None:
        if self.rank > 0 and not self._has_ended and (request := self._next(store)) is not None:
            threading.Thread(target=self._answer, args=request, name="booster-answer", daemon=True).start()

    def _next(self, store: dist.Store) -> tuple[int, int, list[Any]] | None:
        """Return the number of the next request, which answer it wants, and its arguments."""
        if not store.check([f"asked/{self._answered + 1}"]):
            return None
        self._answered += 1
        return self._answered, *json.loads(store.get(f"asked/{self._answered}"))

    def _answer(self, asked: int, number: int, arguments: list[Any]) -> None:
        try:
            found = self.answers[number](*arguments)
        except Exception as error:  # rank 0 raises it
            found = {"error": f"{type(error).__name__} on rank {self.rank}: {error}"}
        with contextlib.suppress(RuntimeError):
            self.link.ask(lambda store: store.set(f"told/{asked}/{self.rank}", json.dumps(found)), None, 5.0)
