"""Heartbeats between machines. Any rank of a machine sends them for all, so one long call is not taken for a loss."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from booster.failure.failure_report import Failure, ranks_text

_BEATS_PER_LIMIT = 12


class Heartbeat:
    """Heartbeat sender and checker; a periodic task of the store client.

    Args:
        rank: this rank.
        machines: machine of every rank.
        limit_s: seconds without a heartbeat after which a machine counts as lost.
        report: called with each failure that is found.
    """

    def __init__(self, rank: int, machines: list[str], limit_s: float, report: Callable[[Failure], None]) -> None:
        self.limit_s, self._report = limit_s, report
        names = list(dict.fromkeys(machines))
        self._ranks = {number: [r for r, name in enumerate(machines) if name == m] for number, m in enumerate(names)}
        self._names = names
        self._own = names.index(machines[rank])
        self._every_s = limit_s / _BEATS_PER_LIMIT
        self._next = 0.0
        self._looked_at = time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}

    def look(self, store: dist.Store) -> None:
        """Send a heartbeat, and check the heartbeats of the other machines."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._every_s
        if now - self._looked_at > 3 * self._every_s:  # this rank was suspended: earlier observations are invalid
            self._seen.clear()
        self._looked_at = now
        store.add(f"beat/{self._own}", 1)
        for machine, ranks in self._ranks.items():
            if machine == self._own or all(store.check([f"ended/{rank}"]) for rank in ranks):
                continue
            beats = store.add(f"beat/{machine}", 0)
            last, since = self._seen.get(machine, (-1, now))
            self._seen[machine] = (beats, since if beats == last else now)
            if now - self._seen[machine][1] > self.limit_s:
                name = self._names[machine].partition("/")[0]
                others = f", with {ranks_text(ranks)}," if len(ranks) > 1 else ""
                self._report(
                    Failure.found(ranks[0], f"on machine {name}{others} has not been heard of for {self.limit_s:g} s")
                )
