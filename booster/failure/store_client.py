"""Client of the job's store, by which ranks exchange failures. A separate thread makes all calls to the store.

A store that hangs (its process is stopped) must not block the monitoring of the processes of this machine.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from booster.failure.failure_report import Failure
from booster.logging import get_logger

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

    Args:
        store: store of this attempt of the job.
        rank: this rank.

    Attributes:
        failure: the job's failure, once it is known.
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
