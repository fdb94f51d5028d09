"""Per-process hooks of the failure monitor: interpreter hooks, the monitor thread and `guard`."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator
from types import FrameType, TracebackType
from typing import NoReturn

import torch.distributed as dist

from booster.errors import ConfigurationError, NonFiniteError, SynchronyError, VerificationError
from booster.failure.diagnosis import LEFT, Failure, is_about_communication
from booster.failure.monitor import FailureMonitor, end_process, exit_now, say
from booster.failure.operation_log import Operations
from booster.failure.peers import Requests

# Raised on every rank, and a caller may handle them: they are published only if they stay uncaught.
_RAISED_ALIKE = (ConfigurationError, NonFiniteError, SynchronyError, VerificationError, StopIteration)
# Operations after which all members of a process group have issued the same number of collectives on it.
_COUNTED = ("optimizer.step",)
_SECOND_LOOK_S = 0.5


class _Process:
    """State that `install` and `report_uncaught` set up in this process."""

    monitor: FailureMonitor | None = None
    operations: Operations | None = None
    server: dist.Store | None = None  # rank 0's store ends with its object, which the process group alone would hold
    previous_hook: Callable | None = None
    previous_exit: Callable | None = None
    own_group: weakref.ref[dist.ProcessGroup] | None = None  # the default group, if launch has created it
    exit_code = 0  # argument of sys.exit; reset if the script starts another operation
    failed_with: int | None = None


class guard(ContextDecorator):  # noqa: N801 (used as a decorator and in `with`, as contextlib's own are)
    """Context manager and decorator for work that other ranks wait for; publishes an exception in it at once.

    The exception propagates. Messages about this rank name the operation it was in. The overhead is a few microseconds.

    Args:
        publishes: whether an exception ends the job; False for calls of which a script may handle exceptions.
    """

    def __init__(self, operation: str, publishes: bool = True) -> None:
        self.operation, self.publishes = operation, publishes

    def __enter__(self) -> None:
        _Process.exit_code = 0
        _watch_termination()
        if _Process.operations is not None:
            _Process.operations.enter(self.operation)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, _RAISED_ALIKE):
            first = publish(error, self.operation) if self.publishes else _known_failure()
            if first is not None and first.rank != _Process.monitor.rank and is_about_communication(error):
                error.args = (first.line(),)  # for a script that handles it: gloo names no rank
        operations = _Process.operations
        if operations is not None:
            count = operations.counts.issued if self.operation in _COUNTED else None
            operations.leave(self.operation, error is None, count)


def _known_failure() -> Failure | None:
    return None if _Process.monitor is None else _Process.monitor.link.failure


def publish(error: BaseException, operation: str = "") -> Failure | None:
    """Tell the other ranks that this one failed; they end within 2 s. Return the job's first failure."""
    monitor = _Process.monitor
    if monitor is None:
        return None
    failure = Failure.of(error, operation, monitor.rank)
    return monitor.publish(monitor.cause_of(error, failure) if is_about_communication(error) else failure)


def begin_batch(replica: int, shapes: dict[str, list[int]]) -> None:
    """Say with which shapes a pass through a model begins; a failure names those that differ within a replica."""
    if _Process.operations is not None:
        _Process.operations.begin_batch(replica, shapes)


def report_uncaught() -> None:
    """Install hooks by which an uncaught exception is reported once per job, and ends all ranks."""
    if _Process.previous_hook is None:
        _Process.previous_hook = sys.excepthook
        sys.excepthook = _on_uncaught
        _Process.previous_exit, sys.exit = sys.exit, _exit  # sys.exit does not call the exception hook
        os._exit = _exit_at_once  # no exit handler runs
        atexit.register(_at_exit)


def destroy_at_exit(group: dist.ProcessGroup) -> None:
    """Destroy this default process group when the interpreter exits; one of the user's is left as it is."""
    report_uncaught()
    _Process.own_group = weakref.ref(group)


@contextlib.contextmanager
def staying_outermost() -> Iterator[None]:
    """Keep our exception hook outermost around code that wraps `sys.excepthook`, such as `init_process_group`.

    `init_process_group` installs a hook that prefixes each line with the rank. Here it wraps the hook before ours: a
    traceback gets its prefix, our one line stays unchanged.
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


def requests() -> Requests | None:
    """Return what asks other ranks while they are elsewhere; None unless the failure monitor runs."""
    return None if _Process.monitor is None else _Process.monitor.requests


def is_watching() -> bool:
    """Return whether the failure monitor runs in this process."""
    return _Process.monitor is not None


def install(
    store: dist.Store,
    rank: int,
    world_size: int,
    *,
    store_name: str = "",
    holds_store: bool = False,
    heartbeat_s: float = 60.0,
    timeout_s: float = 1800.0,
    server: dist.Store | None = None,
) -> None:
    """Wait for all ranks to join, then start the failure monitor; includes `report_uncaught`.

    Args:
        store: store shared by all ranks, used only for this attempt of the job and by no other code.
        store_name, holds_store, heartbeat_s, timeout_s: see `FailureMonitor`.
        server: store that `store` is connected to; it lives on where a script destroys its process group early.
    Raises:
        TimeoutError: a rank did not join in time.
    """
    report_uncaught()
    if _Process.monitor is not None:
        return
    operations, _Process.server = Operations(), server
    _Process.monitor = FailureMonitor(
        store, rank, world_size, operations, store_name, holds_store, heartbeat_s, timeout_s
    )
    _Process.operations = operations
    os.register_at_fork(after_in_child=_forget)
    _catch_termination(_Process.monitor)


def _catch_termination(monitor: FailureMonitor) -> None:
    """Have the monitor end the process at SIGTERM, unless the script has a handler; it may set one later, too."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    signal.signal(signal.SIGTERM, _on_terminate)
    monitor.may_end = _is_ours
    _watch_termination()


def _is_ours() -> bool:
    return signal.getsignal(signal.SIGTERM) is _on_terminate


def _watch_termination() -> None:
    """Have the signal wake the monitor even if the main thread is blocked in C++, where it runs no handler.

    An event loop takes the descriptor while it runs, and clears it at its end: each operation looks for that.
    """
    monitor = _Process.monitor
    if monitor is None or not _is_ours() or threading.current_thread() is not threading.main_thread():
        return
    before = signal.set_wakeup_fd(monitor.wake_descriptor, warn_on_full_buffer=False)
    if before not in (-1, monitor.wake_descriptor):
        signal.set_wakeup_fd(before)


def _on_terminate(number: int, frame: FrameType | None) -> None:
    """Wake the monitor, which ends the process, where the wake-up descriptor is an event loop's."""
    if _Process.monitor is not None:
        _Process.monitor.wake(number)


def _release_termination() -> None:
    monitor = _Process.monitor
    if not _is_ours():
        return
    before = signal.set_wakeup_fd(-1)
    if monitor is None or before != monitor.wake_descriptor:
        signal.set_wakeup_fd(before)  # an event loop's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _forget() -> None:
    """Restore the default signal handlers in a forked process, such as a DataLoader worker; drop the monitor there."""
    _release_termination()
    _Process.monitor = _Process.operations = None


def _on_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Handle an uncaught exception as `sys.excepthook`: show only the job's first error, not its consequences."""
    monitor = _Process.monitor
    own = Failure.of(error, "", monitor.rank if monitor else 0)
    first = publish(error) or own
    if first.rank == own.rank and first.kind and not first.is_users and _Process.previous_hook is not None:
        _Process.previous_hook(kind, error, traceback)
    elif monitor is None:
        say(first.line())
    else:
        monitor.say_once(first.line())
    _Process.failed_with = first.exit_code
    if monitor is not None:
        # A launcher ends all ranks as soon as one has ended: give the others time to print their messages.
        time.sleep(_SECOND_LOOK_S)
        monitor.outlast_peers(first)
        monitor.leave_soon(first.exit_code)


def _exit(status: object = None) -> None:
    """Replace `sys.exit`: record the exit code, then call the original."""
    _Process.exit_code = status if isinstance(status, int) else int(status is not None)
    _Process.previous_exit(status)


def _exit_at_once(status: int) -> NoReturn:
    """Replace `os._exit`: a rank that ends well says so, since its launcher may not tell its exit code."""
    if _Process.monitor is not None and status == 0:
        _Process.monitor.say_ended(0)
    end_process(status)


def _at_exit() -> None:
    """Destroy launch's process group after a success; after a failure exit at once: that may wait for lost ranks."""
    if _Process.failed_with is not None:
        exit_now(_Process.failed_with)
    monitor = _Process.monitor
    if monitor is not None:
        monitor.say_ended(_Process.exit_code)
        if _Process.exit_code == LEFT:  # all ranks leave now, and the next round waits for the end of their processes
            exit_now(LEFT)
        if monitor.requests.answers:
            monitor.requests.linger()
    if dist.is_initialized() and _Process.own_group is not None and dist.group.WORLD is _Process.own_group():
        dist.destroy_process_group()
    if monitor is not None:
        monitor.stop()
        _release_termination()
