"""Requests of rank 0 to the others, answered by a thread while their scripts wait elsewhere or have ended.

A script saves on the main process alone, as it does where each process has the whole model. The parts of the others are
then needed, though they take no part in the call.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from booster.failure.desync import DesyncDetector
from booster.failure.peers import Peer
from booster.failure.store_client import StoreClient

_POLL_S = 0.05
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
                time.sleep(_POLL_S)
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
            time.sleep(_POLL_S)
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
            time.sleep(_POLL_S)

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
