"""Client of the job's store, by which ranks exchange failures and rank 0 asks the others for their parts.

A store that hangs (its process is stopped) must not block the monitoring of the processes of this machine.

A script saves on the main process alone, as it does where each process has the whole model. The parts of the others are
then needed (`Requests`): a thread answers while their scripts wait elsewhere or have ended.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from booster.failure.desync import DesyncDetector
from booster.failure.failure_report import Failure
from booster.failure.peers import Peer
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


_REQUEST_POLL_S = 0.05
_LOOK_S = 1.0
_JOINED, _ALONE = b"joined", b"alone"


class Requests:
    """Requests and answers of this rank, over the job's store.

    Args:
        link: makes the calls to the store.
        inquiries: tells what other ranks do.
        rank, world_size: rank of this process and number of ranks.
        peers: the other ranks of this machine.
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
        """Return whether all ranks take part in this call, which is one of rank 0, or of all.

        Rank 0 waits for the first of the others, or until all of them wait for something else, or have ended.
        """
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
