"""Desynchronization detector: one rank queries all others over the store on a hang, an error or differing counts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from booster.failure import diagnosis
from booster.failure.diagnosis import Failure, RankSnapshot
from booster.failure.operation_log import Operations
from booster.failure.stack_probe import MainThreadProbe

_LOOK_S = 0.5
_PROBE_S = 2.0
_ANSWER_S = 2.5
_WAIT_STEP_S = 0.05
# How long all ranks may be idle. Over a network, data may be delayed for as long as a switch needs to restart.
_STANDSTILL_S = 3.0
_STANDSTILL_OVER_NETWORK_S = 30.0
_STANDSTILL_ON_DEVICE_S = 6.0  # a GPU computes for longer than a host without a sign of progress
_INQUIRY, _LEADER, _BLOCKED, _PROBE = "inquiry", "leader", "blocked", "probe"


@dataclass(frozen=True)
class DesyncReport:
    """Result of an inquiry into a failed exchange."""

    mismatch: Failure | None = None  # the failure, if the ranks called different collectives
    silent: tuple[int, ...] = ()  # ranks that did not answer
    where: str = ""  # description of where the other ranks are


class DesyncDetector:
    """Answers inquiries of other ranks, and starts its own. All methods run in the store client's thread.

    Args:
        main: probe that measures how long the main thread has been waiting.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        operations: Operations,
        main: MainThreadProbe,
        one_machine: bool,
        report: Callable[[Failure], None],
    ) -> None:
        self.rank, self.world_size, self.operations, self.main = rank, world_size, operations, main
        self.one_machine, self._report = one_machine, report
        self._standstill_s = _STANDSTILL_S if one_machine else _STANDSTILL_OVER_NETWORK_S
        self.dead: dict[int, int | None] = {}  # rank -> wait status, for ranks that have ended and cannot answer
        self._answered = 0
        self._has_ended = False
        self._counted_as_blocked = False
        self._all_blocked_looks = 0
        self._next_look = self._next_probe = 0.0
        self._probed = 0
        self._reported_call = 0
        self._incomparable: set[str] = set()

    def look(self, store: dist.Store) -> None:
        """Answer pending inquiries; check for standstills and differing counts. A periodic task of `StoreClient`."""
        number = store.add(_INQUIRY, 0)
        if number > self._answered:
            self._answer(store, number)
        now = time.monotonic()
        if now < self._next_look or self._has_ended:
            return
        self._next_look = now + _LOOK_S
        self._look_for_standstill(store)
        self._report_count(store)
        if self.rank == 0 and now >= self._next_probe:
            self._next_probe = now + _PROBE_S
            self._look_at_counts(store)

    def snapshot(self) -> RankSnapshot:
        """Return the current state of this rank."""
        operation, call = self.operations.current
        wait = self.main.wait or self.main.failed_wait
        on_device = wait is not None and wait.on_device
        groups = self.operations.counts.records()
        behind = next((record.waits_behind for record in groups.values() if record.waits_behind), "")
        text = wait.text() if wait else ""
        return RankSnapshot(
            rank=self.rank,
            operation=operation,
            call=call,
            phrase=self.operations.phrase,
            wait=f"{text}, behind {behind}" if on_device and behind else text,
            blocked_s=self.main.blocked_s,
            completed=dict(self.operations.completed),
            groups=groups,
            left_out=self._left_out(),
            on_device=on_device,
        )

    def _left_out(self) -> int | None:
        """Return how many leading collectives of the previous step were skipped in the current one; None if unknown."""
        if len(self.operations.points) < 2:
            return None
        (_, before), (_, since) = list(self.operations.points)[-2:]
        return self.operations.counts.left_out_since(before, since)

    def say_ended(self, store: dist.Store) -> None:
        """Record that this rank's script has ended: a rank that waits for it waits forever."""
        self._has_ended = True
        groups = self.operations.counts.records(with_operations=False)
        store.set(f"ended/{self.rank}", json.dumps(RankSnapshot(self.rank, groups=groups, ended=True).to_json()))
        if not self._counted_as_blocked:
            store.add(_BLOCKED, 1)

    def look_into(self, store: dist.Store) -> DesyncReport:
        """Query all ranks about a failed exchange; return an empty report if another rank leads an inquiry already."""
        answers = self._inquire(store)
        if answers is None:
            return DesyncReport()
        snapshots, silent = answers
        where = diagnosis.places([one for one in snapshots if one.rank != self.rank])
        # A lost rank explains by itself why the ranks that depend on it are behind the others.
        return DesyncReport(None if silent else diagnosis.diagnose_mismatch(snapshots), tuple(silent), where)

    def others_wait(self, store: dist.Store) -> bool:
        """Return whether all other ranks wait for something, or have ended."""
        answers = self._inquire(store)
        return answers is not None and self._all_wait([one for one in answers[0] if one.rank != self.rank], answers[1])

    def _all_wait(self, snapshots: list[RankSnapshot], silent: list[int]) -> bool:
        return not silent and all(one.ended or one.blocked_s >= self._standstill_s for one in snapshots)

    # ----- standstill -----

    def _look_for_standstill(self, store: dist.Store) -> None:
        blocked = self.main.blocked_s >= self._standstill_limit()
        if blocked != self._counted_as_blocked:
            store.add(_BLOCKED, 1 if blocked else -1)
        self._counted_as_blocked = blocked
        everyone = blocked and store.add(_BLOCKED, 0) >= self.world_size
        self._all_blocked_looks = self._all_blocked_looks + 1 if everyone else 0
        answers = None if self._all_blocked_looks < 2 else self._inquire(store)
        if answers is not None and self._all_wait(*answers) and _may_be_reported(answers[0], self.one_machine):
            self._report(diagnosis.diagnose_standstill(answers[0]))

    def _standstill_limit(self) -> float:
        """Return how many seconds this rank must have been blocked in its wait."""
        wait = self.main.wait
        on_device = wait is not None and wait.on_device
        return max(self._standstill_s, _STANDSTILL_ON_DEVICE_S) if on_device else self._standstill_s

    # ----- counts -----

    def _report_count(self, store: dist.Store) -> None:
        """Publish the counts at the `optimizer.step` that rank 0 asks about, once this rank has reached it."""
        if not store.check([_PROBE]):
            return
        call = int(store.get(_PROBE))
        if call == self._reported_call:
            return
        counted = next((numbers for number, numbers in reversed(self.operations.points) if number == call), None)
        if counted is not None:
            self._reported_call = call
            store.set(f"count/{self.rank}", json.dumps([call, counted]))

    def _look_at_counts(self, store: dist.Store) -> None:
        counts = self._counts(store)
        if counts:
            differing = diagnosis.compare_counts(counts, self._incomparable)
            if differing and (answers := self._inquire(store)) is not None:
                snapshots, silent = answers
                failure = None if silent else diagnosis.diagnose_counts(self._probed, differing, snapshots, counts)
                if failure is not None:
                    self._report(failure)
                elif not silent:
                    self._incomparable |= differing.keys()
        latest = self.operations.points[-1][0] if self.operations.points else 0
        if latest > self._probed and (counts or not self._probed):
            self._probed = latest
            store.set(_PROBE, str(latest))

    def _counts(self, store: dist.Store) -> dict[int, dict[str, int]]:
        """Return rank -> group -> count at the step asked about; empty until all ranks have reached it."""
        keys = [f"count/{rank}" for rank in range(self.world_size)]
        if not self._probed or not store.check(keys):
            return {}
        found = [json.loads(text) for text in store.multi_get(keys)]
        return (
            {rank: numbers for rank, (call, numbers) in enumerate(found)}
            if all(call == self._probed for call, _ in found)
            else {}
        )

    # ----- asking -----

    def _inquire(self, store: dist.Store) -> tuple[list[RankSnapshot], list[int]] | None:
        """Ask all ranks; return None if another rank does already, as only one leads an inquiry at a time.

        Returns:
            The snapshots in rank order, and the ranks that are not known to be dead but did not answer.
        """
        if store.compare_set(_LEADER, "", str(self.rank)) != str(self.rank).encode():
            return None
        number = store.add(_INQUIRY, 1)
        self._answer(store, number)
        missing, found = set(range(self.world_size)) - self.dead.keys(), {}
        until = time.monotonic() + _ANSWER_S
        while missing and time.monotonic() < until:
            for rank in sorted(missing):
                for key in (f"answer/{number}/{rank}", f"ended/{rank}"):
                    if rank in missing and store.check([key]):
                        found[rank] = RankSnapshot.of_json(json.loads(store.get(key)))
                        missing.discard(rank)
            time.sleep(_WAIT_STEP_S)
        store.set(_LEADER, "")
        return [found[rank] for rank in sorted(found)], sorted(missing)

    def _answer(self, store: dist.Store, number: int) -> None:
        self._answered = number
        if not self._has_ended:  # which has been said
            store.set(f"answer/{number}/{self.rank}", json.dumps(self.snapshot().to_json()))


def _may_be_reported(snapshots: list[RankSnapshot], one_machine: bool) -> bool:
    """Return whether ranks that all wait can only wait forever.

    Idle processes of one machine do. Data may be on its way over a network, and a GPU may be computing: there, another
    member of the group provably does not take part in the collective that a rank waits in.
    """
    on_device = [one for one in snapshots if one.on_device]
    if not all(diagnosis.missing_members(one, snapshots) for one in on_device):
        return False
    return one_machine or any(diagnosis.missing_members(one, snapshots) for one in snapshots)
