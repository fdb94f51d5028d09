"""Workers side by side, each with its own pool of ranks, that judge class after class within a time limit.

A worker and its ranks are one process group: what does not answer in time, or ends by itself, is killed as a whole and
started again for the next class. Classes of a family stay with one worker, which has imported the family.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from multiprocessing.connection import Connection, wait
from typing import Any

from zoo_tests.campaigns.census.classes import HeadClass
from zoo_tests.campaigns.census.verdict import NO_ANSWER, Verdict

Task = tuple[HeadClass, list[str], Verdict | None]  # class, layouts, what is known of it


def judged(tasks: list[Task], num_jobs: int, limit_s: float) -> Iterator[tuple[HeadClass, Verdict]]:
    """The verdicts, in the order in which they come.

    Args:
        tasks: in the order of families.
        num_jobs: number of workers.
        limit_s: seconds for one class, from the second class of a worker on; imports come before the first.
    """
    families = deque(deque(group) for _, group in groupby(tasks, key=lambda task: task[0].family))
    workers = [_Worker(limit_s) for _ in range(min(num_jobs, len(families)))]
    try:
        while True:
            for worker in workers:
                worker.take(families)
            busy = [worker for worker in workers if worker.task is not None]
            if not busy:
                return
            deadline = min(worker.deadline for worker in busy)
            ready = wait([worker.connection for worker in busy], max(deadline - time.monotonic(), 0))
            for worker in busy:
                if worker.connection in ready or time.monotonic() > worker.deadline:
                    yield worker.answer()
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """A process that judges classes of one family after the other.

    Attributes:
        task: what it works on; None if there is nothing left.
        deadline: when it is given up, on the monotonic clock.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._process, self.task, self.deadline = limit_s, None, None, 0.0
        self._family: deque[Task] = deque()

    def take(self, families: deque[deque[Task]]) -> None:
        """Begin with the next class, if there is any and none is under way."""
        if self.task is not None:
            return
        if not self._family and families:
            self._family = families.popleft()
        if not self._family:
            return
        is_new = self._process is None
        if is_new:
            self._start()
        self.task, self._began = self._family.popleft(), time.monotonic()
        self.deadline = self._began + self._limit_s * (2 if is_new else 1)
        self.connection.send(self.task)

    def answer(self) -> tuple[HeadClass, Verdict]:
        """The verdict on the class, also if the process has ended or is too slow."""
        head, layouts, known = self.task
        self.task = None
        try:
            verdict = self.connection.recv() if self.connection.poll() else None
            reason = f"{NO_ANSWER} within {self._limit_s:g} s"
        except (EOFError, ConnectionError):
            self._process.join()
            verdict, reason = None, f"process ended: exit code {self._process.exitcode}"
        if verdict is None:
            self.stop()
            verdict = known or Verdict(plain="exact")
            verdict.layouts |= dict.fromkeys(verdict.missing(layouts), reason)
        verdict.seconds = round(time.monotonic() - self._began, 2)
        return head, verdict

    def stop(self) -> None:
        """Kill the process with its ranks."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,))
        self._process.start()
        theirs.close()
        self.connection.recv()  # it leads its process group


def _work(connection: Connection) -> None:
    """Judge what comes, until the process that sends it has ended; then the ranks end too, also in mid-class."""
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    connection.send(None)
    from zoo_tests.campaigns.census.trained import judge  # imports torch

    with suppress(EOFError, ConnectionError):
        while True:
            head, layouts, known = connection.recv()
            connection.send(_without_failing(judge, head, layouts, known))
    os.killpg(0, signal.SIGKILL)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def _without_failing(judge: Any, head: HeadClass, layouts: list[str], known: Verdict | None) -> Verdict:
    try:
        return judge(head, layouts, known)
    except Exception as error:  # of one class; the others go on
        return Verdict(plain=f"{type(error).__name__}: {' '.join(str(error).split())[:140]}".replace("|", "/"))
