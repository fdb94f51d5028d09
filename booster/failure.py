"""What happens when a rank fails: its error reaches the other ranks and ends the job, instead of leaving them waiting.

A failing rank writes one short message into the job's store; a thread on every other rank looks there a few times a
second, and ends its process even where the main thread is blocked in a collective. This is not error handling: nothing
is retried or recovered. Until `install` was called (by `booster.launch`), everything here does nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from booster.errors import ConfigurationError

_FAILURE_KEY = "booster/failure"
_SPEAKER_KEY = "booster/speaker"
_POLL_S = 0.2
# What a rank gets to end by itself, with its own message and clean-up, before it is ended.
_GRACE_S = 0.5
_CLEANUP_S = 1.0
_STORE_TIMEOUT = timedelta(seconds=2)
_MAX_MESSAGE = 600
_INTERRUPTED = 130
# Raised alike on every rank, and a caller may well handle them: they are news only when nobody did.
_RAISED_ALIKE = (ConfigurationError, StopIteration)


@dataclass(frozen=True)
class Failure:
    """The first error of a job, as it travels between ranks."""

    rank: int
    operation: str
    kind: str
    message: str
    is_users: bool
    exit_code: int

    @classmethod
    def of(cls, error: BaseException, operation: str, rank: int) -> Failure:
        """Describe an exception in one line."""
        message = " ".join(str(error).split())[:_MAX_MESSAGE]
        interrupted = isinstance(error, KeyboardInterrupt)
        return cls(
            rank=rank,
            operation=operation,
            kind=type(error).__name__,
            message="interrupted" if interrupted else message,
            is_users=interrupted or isinstance(error, ConfigurationError),
            exit_code=_INTERRUPTED if interrupted else 1,
        )

    def line(self) -> str:
        """For a user's mistake the sentence alone; else also where it happened."""
        if self.exit_code == _INTERRUPTED:
            return self.message
        if self.is_users:
            return f"error: {self.message}"
        place = f" in {self.operation}" if self.operation else ""
        return f"error on rank {self.rank}{place}: {self.kind}: {self.message}"


class FailureMonitor:
    """This rank's view of the job's failure, and the thread that looks for it.

    Args:
        store: any store all ranks share; it is cloned, so that a main thread blocked on its connection is no hindrance.
        rank: this rank.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.rank = rank
        self._store = store.clone()
        self._store.set_timeout(_STORE_TIMEOUT)
        self._stopped = threading.Event()
        self._leave_at: float | None = None
        self._exit_code = 1
        self._thread = threading.Thread(target=self._watch, name="booster-failure", daemon=True)
        self._thread.start()

    def publish(self, failure: Failure) -> Failure:
        """Make it known unless another was; returns the job's first."""
        try:
            first = self._store.compare_set(_FAILURE_KEY, "", json.dumps(asdict(failure)))
            return Failure(**json.loads(first))
        except RuntimeError:  # the store is gone, so there is nobody left to tell
            return failure

    def may_speak(self) -> bool:
        """True on one rank of the job: the one that prints the line."""
        try:
            return self._store.add(_SPEAKER_KEY, 1) == 1
        except RuntimeError:
            return True

    def leave_soon(self, exit_code: int) -> None:
        """Let the process end by itself; if it does not, end it: an exit handler may wait for a rank that is gone."""
        self._exit_code = exit_code
        self._leave_at = time.monotonic() + _CLEANUP_S

    def stop(self) -> None:
        """End the thread: one that is inside the store's C++ code when the interpreter goes would abort it."""
        self._stopped.set()
        self._thread.join(_STORE_TIMEOUT.total_seconds())

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_S):
            if self._leave_at is not None:
                if time.monotonic() > self._leave_at:
                    _exit_now(self._exit_code)
                continue
            try:
                failure = self._find()
            except RuntimeError:  # the process that held the store has ended, and the job with it
                return
            if failure is not None and failure.rank != self.rank:
                self._follow(failure)

    def _find(self) -> Failure | None:
        if not self._store.check([_FAILURE_KEY]):
            return None
        return Failure(**json.loads(self._store.get(_FAILURE_KEY)))

    def _follow(self, failure: Failure) -> None:
        """End this rank because another failed, unless the main thread is ending already."""
        if self._stopped.wait(_GRACE_S) or self._leave_at is not None:
            return
        if self.may_speak():
            _say(failure.line())
        _exit_now(failure.exit_code)


class guard(ContextDecorator):  # noqa: N801 (used as a decorator and in `with`, as contextlib's own are)
    """Around work that other ranks wait for: an exception in it is made known to them at once, and passes on.

    Costs two calls when nothing fails.
    """

    def __init__(self, operation: str) -> None:
        self.operation = operation

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, _RAISED_ALIKE):
            publish(error, self.operation)


class _Process:
    """What `install` set up in this process."""

    monitor: FailureMonitor | None = None
    previous_hook: Callable | None = None
    failed_with: int | None = None


def publish(error: BaseException, operation: str = "") -> None:
    """Tell the other ranks that this one failed; they end within 2 s."""
    monitor = _Process.monitor
    if monitor is not None:
        monitor.publish(Failure.of(error, operation, monitor.rank))


def report_uncaught() -> None:
    """From now on an uncaught exception of this process is reported once a job, and ends all ranks."""
    if _Process.previous_hook is None:
        _Process.previous_hook = sys.excepthook
        sys.excepthook = _on_uncaught
        atexit.register(_at_exit)


@contextlib.contextmanager
def staying_outermost() -> Iterator[None]:
    """Around code that wraps `sys.excepthook`, as `init_process_group` does to put the rank before each line.

    What it wraps is the hook before ours: a traceback gets its prefix, our one line stays as it is.
    """
    if sys.excepthook is not _on_uncaught:
        yield
        return
    sys.excepthook = _Process.previous_hook
    try:
        yield
    finally:
        _Process.previous_hook = sys.excepthook
        sys.excepthook = _on_uncaught


def install(store: dist.Store, rank: int) -> None:
    """Start to watch for failures of other ranks; `report_uncaught` is included."""
    report_uncaught()
    if _Process.monitor is None:
        _Process.monitor = FailureMonitor(store, rank)


def _on_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """The process's `sys.excepthook`: the job's first error is shown, those that follow from it are not."""
    monitor = _Process.monitor
    own = Failure.of(error, "", monitor.rank if monitor else 0)
    first = monitor.publish(own) if monitor else own
    if first.rank == own.rank and not own.is_users and _Process.previous_hook is not None:
        _Process.previous_hook(kind, error, traceback)
    elif monitor is None or monitor.may_speak():
        _say(first.line())
    _Process.failed_with = first.exit_code
    if monitor is not None:
        # A launcher ends all ranks as soon as one has, and the store may be this process's: the others get the time
        # to say what they have to say, and to look into the store once more.
        time.sleep(_GRACE_S)
        monitor.leave_soon(first.exit_code)


def _at_exit() -> None:
    """Leave the process group after a success; after a failure leave at once: destroying it may wait for lost ranks."""
    if _Process.failed_with is not None:
        _exit_now(_Process.failed_with)
    if dist.is_initialized():
        dist.destroy_process_group()
    if _Process.monitor is not None:
        _Process.monitor.stop()


def _say(line: str) -> None:
    """One write, so that lines of two ranks cannot mix."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _exit_now(code: int) -> None:
    """End the process without any clean-up that could wait for another rank."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
