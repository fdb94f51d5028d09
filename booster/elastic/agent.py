"""The agent of a machine: it follows the leader's decisions, and makes them if it is the leader."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from booster.elastic.job_environment import FOLDER, LEAVE, LIMIT, MODULES, VARIABLE, ElasticPlace, note
from booster.elastic.leader import Leader, Limits
from booster.elastic.local_ranks import LocalRanks, MachineMemory
from booster.elastic.rendezvous import DONE, END, FAILED, IDLE, LEFT, RUN, RUNNING, Decision, Rendezvous, Report
from booster.failure.failure_report import LEFT as LEFT_CODE

_POLL_S = 0.05
_END_S = 1.5  # that ranks have to end by themselves, before they are killed


@dataclass
class _Round:
    """What this agent knows of its present round."""

    number: int = 0
    first_rank: int = 0
    places: list[int] = field(default_factory=list)
    state: str = IDLE
    ended: list[list[int]] = field(default_factory=list)
    told_at: float | None = None
    is_killed: bool = False


class Agent:
    """Runs the ranks of this machine, round after round.

    Args:
        rendezvous: where all agents of the job meet.
        ranks: starts and ends ranks.
        memory: what outlives ranks.
        limits: numbers that the user may choose.
        num_places: number of ranks of this machine.
        rejoin_s: how long the place of a rank that has died stays empty.
        job_id: name of the job.
        events: file to which times of events are appended; "" for none.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        ranks: LocalRanks,
        memory: MachineMemory,
        limits: Limits,
        num_places: int,
        *,
        rejoin_s: float,
        job_id: str,
        events: str = "",
    ) -> None:
        self._rendezvous, self._ranks, self._memory, self._limits = rendezvous, ranks, memory, limits
        self._num_places, self._rejoin_s, self._job_id, self._events = num_places, rejoin_s, job_id, events
        self._empty_until = dict.fromkeys(range(num_places), 0.0)
        self._round, self._decision = _Round(), Decision()
        self._leader = self._new_leader()
        self._beat, self._taught = 0, False

    def run(self) -> Decision:
        """Follow the leader until the job ends; return its last decision."""
        while self._decision.order != END:
            self._ranks.poll()
            self._look_at_ranks()
            try:
                self._talk()
            except (dist.DistError, ConnectionError, RuntimeError):
                self._find_leader()
                continue
            self._follow()
            time.sleep(_POLL_S)
        self._stop_ranks(wait=True)
        if self._leader is not None:
            self._wait_for_followers()
        return self._decision

    # ----- messages -----

    def _new_leader(self) -> Leader | None:
        return Leader(self._limits, _say) if self._rendezvous.leads else None

    def _talk(self) -> None:
        """Report, decide if this agent leads, and take the decision."""
        self._beat += 1
        self._rendezvous.report(self._report())
        if self._leader is not None:
            before = self._leader.decision
            decision = self._leader.decide(self._rendezvous.reports(), time.monotonic())
            if decision != before:
                self._rendezvous.decide(decision)
                store = str(self._rendezvous.endpoint)
                note(self._events, decision.order, round=decision.round, ranks=decision.world_size, store=store)
        self._decision = self._rendezvous.decision()

    def _report(self) -> Report:
        now = time.monotonic()
        place = self._place()
        return Report(
            beat=self._beat,
            host=socket.gethostname(),
            places=sum(until <= now for until in self._empty_until.values()) if self._ranks.is_ready else 0,
            all_places=self._num_places if self._ranks.is_ready else 0,
            state=self._round.state,
            round=self._round.number,
            busy=self._ranks.running,
            ended=self._round.ended,
            progress=self._memory.newest_snapshot(),
            limit=place.get(LIMIT) if self._round.state == LEFT else None,
        )

    def _find_leader(self) -> None:
        """Find another leader after the machine of the last one is lost, or become it."""
        _say(f"elastic: the machine that holds the rendezvous, {self._rendezvous.endpoint}, does not answer any more")
        note(self._events, "detected", round=self._round.number, ranks=[])
        self._stop_ranks(wait=True)
        if self._round.state == RUNNING:
            self._round.state = IDLE
        self._rendezvous.meet(self._limits.join_s)
        self._leader, self._decision = self._new_leader(), Decision(self._round.number)

    def _wait_for_followers(self) -> None:
        """Hold the store until the other agents have read that the job has ended, for a few seconds at most."""
        until = time.monotonic() + self._limits.lost_s
        beats: dict[int, int] = {}
        while time.monotonic() < until:
            time.sleep(4 * _POLL_S)
            with contextlib.suppress(dist.DistError):
                found = {number: each.beat for number, each in self._rendezvous.reports().items()}
                if all(beat == beats.get(number) for number, beat in found.items()):
                    return
                beats = found

    # ----- ranks -----

    def _place(self) -> ElasticPlace:
        limits = self._limits
        folder = str(self._memory.folder)
        return ElasticPlace(folder, limits.min_ranks, limits.max_ranks, self._round.number, self._events)

    def _follow(self) -> None:
        decision, current = self._decision, self._round
        if current.told_at is not None:
            self._stop_ranks()
        if decision.order != RUN or decision.round != current.number:
            if self._ranks.running:
                self._stop_ranks()
            elif decision.order == RUN:
                self._begin(decision)
        elif decision.leaves and current.state == RUNNING:
            self._place().put(LEAVE, True)

    def _begin(self, decision: Decision) -> None:
        """Start this machine's ranks of a round."""
        own = [(first, count) for agent, first, count in decision.members if agent == self._rendezvous.number]
        if not own:
            return
        first, count = own[0]
        now = time.monotonic()
        places = sorted(range(self._num_places), key=lambda place: (self._empty_until[place] > now, place))[:count]
        self._round = _Round(decision.round, first, sorted(places), RUNNING)
        index = next(index for index, each in enumerate(decision.members) if each[0] == self._rendezvous.number)
        self._ranks.start(
            {place: self._environment(decision, index, number) for number, place in enumerate(self._round.places)}
        )

    def _environment(self, decision: Decision, machine: int, number: int) -> Mapping[str, str]:
        """Return the variables of a rank: torchrun's, and those of an elastic job."""
        endpoint, current = self._rendezvous.endpoint, self._round
        return {
            **os.environ,
            "RANK": str(current.first_rank + number),
            "LOCAL_RANK": str(current.places[number]),
            "WORLD_SIZE": str(decision.world_size),
            "LOCAL_WORLD_SIZE": str(len(current.places)),
            "GROUP_RANK": str(machine),
            "GROUP_WORLD_SIZE": str(len(decision.members)),
            "MASTER_ADDR": endpoint.host,
            "MASTER_PORT": str(endpoint.port),
            "TORCHELASTIC_RUN_ID": self._job_id,
            "TORCHELASTIC_RESTART_COUNT": str(decision.round),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            VARIABLE: self._place().to_json(),
        }

    def _look_at_ranks(self) -> None:
        """Update the state of the round from the ranks that have ended."""
        current, ended = self._round, self._ranks.ended
        self._teach()
        if current.state != RUNNING or not ended:
            return
        own = {0, signal.SIGTERM, signal.SIGKILL if current.is_killed else signal.SIGTERM}
        if self._ranks.got_sigterm:  # what follows from that is no failure
            ended = {place: status for place, status in ended.items() if status & 0x7F not in own}
        codes = {place: (status >> 8 if not status & 0x7F else None) for place, status in ended.items()}
        failed = {place: status for place, status in ended.items() if codes[place] not in (0, LEFT_CODE)}
        if failed:
            for place, status in failed.items():
                if status & 0x7F and place in self._empty_until:
                    self._empty_until[place] = time.monotonic() + self._rejoin_s
            current.state = FAILED
            current.ended = [[self._rank_of(place), status] for place, status in failed.items()]
            note(self._events, "detected", round=current.number, ranks=[rank for rank, _ in current.ended])
            self._stop_ranks()
        elif not self._ranks.running and not self._ranks.got_sigterm:
            current.state = LEFT if LEFT_CODE in codes.values() else DONE

    def _rank_of(self, place: int) -> int:
        return self._round.first_rank + (self._round.places.index(place) if place in self._round.places else 0)

    def _teach(self) -> None:
        """Have the fork server import what the ranks have imported, once they train."""
        if not self._taught and self._memory.newest_snapshot():
            names = self._place().get(MODULES)
            if names:
                self._ranks.import_modules(names)
                self._taught = True
                with contextlib.suppress(dist.DistError):  # lost: that is noticed at the next report
                    self._rendezvous.tell_modules(names)

    def _stop_ranks(self, wait: bool = False) -> None:
        """End the ranks of this machine, with SIGKILL if they take long."""
        current = self._round
        while self._ranks.running:
            now = time.monotonic()
            if current.told_at is None:
                current.told_at = now
                self._ranks.signal(signal.SIGTERM)
            elif now - current.told_at > _END_S and not current.is_killed:
                current.is_killed = True
                self._ranks.signal(signal.SIGKILL)
            if not wait:
                return
            time.sleep(_POLL_S)
            self._ranks.poll()
        current.told_at = None

    # ----- the end -----

    def keep_state(self) -> Path | None:
        """Copy the snapshots of this machine to disk, where the ranks have said; return the directory."""
        folder = self._place().get(FOLDER)
        if folder is None or not self._memory.newest_snapshot():
            return None
        target = Path(folder) / f"memory-of-{socket.gethostname()}-{self._rendezvous.number}"
        shutil.copytree(self._place().pieces, target, dirs_exist_ok=True)
        return target


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
