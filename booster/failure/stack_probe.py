"""Probe of the main thread's stack: whether it waits for other ranks, and at which line. No instrumentation."""

from __future__ import annotations

import inspect
import linecache
import os
import queue
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

from booster.failure.operation_log import RecordedOperation, outstanding_on_device

_TORCH = f"{os.sep}torch{os.sep}"
_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_SITE_PACKAGES = sysconfig.get_paths()["purelib"] + os.sep
_WRAPPERS = ("wrapper", "_fn", "inner")
_WAITING_WORDS = (".wait(", "wait_tensor(")
# Calls in which the host waits for its GPU, and so for the ranks that the GPU waits for. They look the same on the CPU.
_DEVICE_WORDS = (".item(", ".tolist(", ".cpu(", "synchronize(", "float(")
_OWN_THREADS = "booster-"
# What other threads of this process alone hand out, and lines that wait for it: `queue.get()`, `with lock:`.
_OF_THREADS = (queue.SimpleQueue, type(threading.Lock()), type(threading.RLock()))
_TAKES = re.compile(r"\bwith ([\w.]+):|\b([\w.]+)\.(?:get|acquire)(?:\(\)|,)")
_ENGINE = f"{os.sep}torch{os.sep}autograd{os.sep}"
_SHOWN_PARTS = 3
# The network threads of a waiting rank, one per process group, wake up a hundred times a second; each uses up to half a
# percent of a core.
_IDLE_SHARE = 0.02
_IDLE_SHARE_OF_A_GROUP = 0.005
_LEAST_CPU_S = 0.02
_LONGEST_GAP_S = 2.0  # between two looks; after a longer gap this process was suspended
_GLOO_WORKERS, _GLOO_NETWORK = "pt_gloo_runloop", "gloo_tcp_loop"
_WAITING_CODE: set[CodeType] = set()  # marked by a decorator, so complete once the modules are imported
Function = TypeVar("Function", bound=Callable)


def waits_for_ranks(function: Function) -> Function:
    """Mark a function that blocks until another rank acts, by other means than torch's collectives."""
    _WAITING_CODE.add(function.__code__)
    return function


@dataclass(frozen=True)
class Wait:
    """A call that waits for other ranks."""

    # call, place: the call, and its file and line
    call: str
    place: str
    on_device: bool = False  # whether the host waits for its GPU

    def text(self) -> str:
        """Describe the wait, for messages."""
        called = f"waiting for its GPU in {self.call}" if self.on_device else f"waiting in {self.call}"
        return f"{called} at {self.place}" if self.place else called


def wait_of(frame: FrameType | None) -> Wait | None:
    """Return the wait that a stack is in; None if it does not wait for ranks; `frame`: innermost frame of the stack."""
    if frame is None:
        return None
    inside = frame.f_code.co_filename
    if inside.startswith(_STANDARD_LIBRARY) and not inside.startswith(
        _SITE_PACKAGES
    ):  # it waits for a lock, a queue or another process, not for ranks
        return None
    line = _line(frame)
    call, on_device = "wait", False
    if not (_DISTRIBUTED in inside or _is_marked(frame) or any(word in line for word in _WAITING_WORDS)):
        found = next((word for word in _DEVICE_WORDS if word in line), None)
        if found is None:
            return None
        call, on_device = found.strip(".("), True
    while frame is not None and (_TORCH in frame.f_code.co_filename or _is_marked(frame)):
        if frame.f_code.co_name not in _WRAPPERS:
            call = frame.f_code.co_name
        frame = frame.f_back
    return Wait(call, _place(frame), on_device)


def current_wait() -> Wait | None:
    """Return the main thread's wait; during a backward pass on a device, the wait of the device's thread."""
    frames = sys._current_frames()
    main = frames.get(threading.main_thread().ident)
    found = wait_of(main)
    if found is not None and found.on_device and not outstanding_on_device():
        return None  # it waits for no rank, or computes on the CPU
    if found is not None or main is None or _ENGINE not in main.f_code.co_filename:
        return found
    workers = (wait_of(frame) for ident, frame in frames.items() if ident != threading.main_thread().ident)
    return next((wait for wait in workers if wait is not None), None)


def _another_thread_acts() -> bool:
    """Return whether a thread of the script may go on by itself: others may wait for what it will issue."""
    frames, main = sys._current_frames(), threading.main_thread()
    others = [each for each in threading.enumerate() if each is not main and not each.name.startswith(_OWN_THREADS)]
    return any(acts_alone(frames[each.ident]) for each in others if each.ident in frames)


def acts_alone(frame: FrameType) -> bool:
    """Return whether a stack, given by its innermost frame, runs the script and waits for no rank or thread."""
    if wait_of(frame) is not None:
        return False
    if frame.f_code.co_filename == threading.__file__ and frame.f_locals.get("timeout", 0) in (None, -1):
        return False
    if isinstance(_taken_from(frame), _OF_THREADS):
        return False
    files = (each.f_code.co_filename for each, _ in traceback.walk_stack(frame))
    return any(not name.startswith((_STANDARD_LIBRARY, _SITE_PACKAGES)) for name in files)


def _taken_from(frame: FrameType) -> Any:
    """Return the object by whose name a line takes something without a limit, as in C no frame shows; None if none."""
    found = _TAKES.search(_line(frame))
    if found is None:
        return None
    first, *names = found[found.lastindex].split(".")
    taken = frame.f_locals.get(first, frame.f_globals.get(first))
    for name in names:
        taken = inspect.getattr_static(taken, name, None)
    return taken


def wait_of_error(error: BaseException) -> Wait | None:
    """Return the wait from which an exception was raised; None if it was raised elsewhere."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return wait_of(frames[-1]) if frames else None


class MainThreadProbe:
    """Measures how long the main thread has been in one wait in which nothing goes on.

    A wait for ranks uses no processor time. A wait for the GPU spins: there, nothing goes on if NCCL operations are
    outstanding and stay the same.

    Attributes:
        wait: the wait in which nothing has gone on since the previous look; None if the main thread makes progress.
        failed_wait: the wait that ended in an error, for example because a rank is lost or late.
        own_threads: threads of the failure monitor, which are not counted.
    """

    def __init__(self) -> None:
        self.wait: Wait | None = None
        self.failed_wait: Wait | None = None
        self.own_threads: set[int] = set()
        self._instruction: tuple[int, int] | None = None
        self._activity: Activity | None = None  # when the wait began
        self._outstanding: tuple[RecordedOperation, ...] = ()
        self._outstanding_since = 0.0
        self._looked_at = time.monotonic()

    def look(self) -> None:
        """Update the state; called twice a second."""
        now = time.monotonic()
        suspended = now - self._looked_at > _LONGEST_GAP_S
        self._looked_at = now
        instruction, before = _instruction(), self._activity
        if suspended or instruction != self._instruction:
            self._instruction, self._activity, self.wait = instruction, None, None
            self._outstanding = ()
            return
        wait = current_wait()
        if wait is None or _another_thread_acts():
            self._activity, self.wait, self._outstanding = None, None, ()
            return
        activity = None if wait.on_device else Activity.now(self.own_threads)
        if before is not None and activity is not None and activity.is_idle_since(before):
            self.wait = wait
            return
        self._activity = activity
        self._look_at_device(wait, now)

    def _look_at_device(self, wait: Wait, now: float) -> None:
        """Update the state in a wait that uses processor time, as one for the GPU does."""
        outstanding = outstanding_on_device()
        if outstanding and outstanding == self._outstanding:
            self.wait = replace(wait, on_device=True)
        else:
            self._outstanding, self._outstanding_since, self.wait = outstanding, now, None

    @property
    def blocked_s(self) -> float:
        """Seconds for which nothing has gone on; 0 if the main thread does not wait for other ranks."""
        if self.wait is None:
            return 0.0
        if self.wait.on_device:
            return time.monotonic() - self._outstanding_since
        return 0.0 if self._activity is None else time.monotonic() - self._activity.at


@dataclass(frozen=True)
class Activity:
    """Activity of this process's threads up to a point in time."""

    at: float  # the point in time
    slices: tuple[str, ...]  # number of time slices of the main thread and of each gloo worker
    cpu: float  # CPU seconds of all threads except the failure monitor's
    groups: int  # number of gloo network threads, which receive data from other ranks

    @classmethod
    def now(cls, own_threads: set[int]) -> Activity | None:
        """Measure the activity so far; None if the system does not report it, so that nothing can be proved."""
        slices, cpu, groups = [], 0.0, 0
        for task in _tasks():
            if int(task.name) in own_threads:
                continue
            try:
                used, _, times = (task / "schedstat").read_text().split()
                cpu += int(used) / 1e9
                name = (task / "comm").read_text()
                groups += name.startswith(_GLOO_NETWORK)
                if int(task.name) == os.getpid() or name.startswith(_GLOO_WORKERS):
                    slices.append(times)
            except (OSError, ValueError):  # the thread has ended
                continue
        return cls(time.monotonic(), tuple(slices), cpu, groups) if slices else None

    def is_idle_since(self, before: Activity) -> bool:
        """Return whether no data was sent or received and nothing was computed since `before`."""
        share = _IDLE_SHARE + _IDLE_SHARE_OF_A_GROUP * self.groups
        allowed = max(share * (self.at - before.at), _LEAST_CPU_S)
        return self.slices == before.slices and self.cpu - before.cpu <= allowed


def _tasks() -> list[Path]:
    try:
        return list(Path("/proc/self/task").iterdir())
    except OSError:
        return []


def _instruction() -> tuple[int, int] | None:
    """Return an identifier of the main thread's current instruction; it changes as soon as the thread proceeds."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    return None if frame is None else (id(frame), frame.f_lasti)


def _is_marked(frame: FrameType) -> bool:
    return frame.f_code in _WAITING_CODE


def _line(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-_SHOWN_PARTS:])}:{frame.f_lineno}"
