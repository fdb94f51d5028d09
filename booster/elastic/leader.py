"""The leader's decisions: who takes part in a round, when it ends, and when the job does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from booster.elastic.rendezvous import DONE, END, FAILED, IDLE, LEFT, RUN, STOP, Decision, Report

_SIGNAL_CODE = 128
_REGROUP_S = 3.0  # that agents need to find a new leader


@dataclass(frozen=True)
class Limits:
    """Numbers that the user may choose.

    Attributes:
        min_ranks, max_ranks: number of ranks that the job may have.
        join_s: how long the job waits for `min_ranks`.
        last_call_s: how long the first round waits for `max_ranks` once `min_ranks` are there.
        lost_s: how long an agent may send no report.
        max_restarts: rounds in sequence that may fail without a new snapshot.
    """

    min_ranks: int
    max_ranks: int
    join_s: float = 600.0
    last_call_s: float = 30.0
    lost_s: float = 4.0
    max_restarts: int = 10


class Leader:
    """Decides from the reports of all agents; it has no state that its successor could not find in them.

    Args:
        limits: numbers that the user may choose.
        say: prints a line for the user.
    """

    def __init__(self, limits: Limits, say: Callable[[str], None]) -> None:
        self.limits, self._say = limits, say
        self.decision = Decision()
        self._seen: dict[int, tuple[int, float]] = {}
        self._waits_since: float | None = None
        self._failures, self._progress = 0, 0
        self._cap: tuple[int, int] | None = None  # (ranks that there were, ranks at most)

    def decide(self, reports: Mapping[int, Report], now: float) -> Decision:
        """Return the decision after new reports.

        Args:
            reports: agent -> its newest report.
            now: monotonic time, in seconds.
        """
        alive = self._alive(reports, now)
        if self.decision.order == RUN:
            self.decision = self._look_at_round(alive)
        if self.decision.order == STOP:
            self.decision = self._next_round(alive, reports, now)
        return self.decision

    def _alive(self, reports: Mapping[int, Report], now: float) -> dict[int, Report]:
        """Return the agents that are heard of."""
        for agent, report in reports.items():
            beat, _ = self._seen.get(agent, (-1, now))
            if report.beat != beat:
                self._seen[agent] = (report.beat, now)
        return {agent: each for agent, each in reports.items() if now - self._seen[agent][1] < self.limits.lost_s}

    def _look_at_round(self, alive: Mapping[int, Report]) -> Decision:
        """Continue the round, let others join it, or stop it."""
        decision = self.decision
        members = [alive.get(agent) for agent, _, _ in decision.members]
        # An agent that has not started the round yet reports an earlier one.
        here = [each for each in members if each is not None and each.round == decision.round]
        if len(here) == len(members) and all(each.state == DONE for each in here):
            return replace(decision, order=END)
        if None in members or any(each.state in (FAILED, LEFT, IDLE) for each in here):
            return replace(decision, order=STOP)
        if not decision.leaves and decision.world_size < self.limits.max_ranks and self._can_grow(alive):
            return replace(decision, leaves=True)
        return decision

    def _can_grow(self, alive: Mapping[int, Report]) -> bool:
        ranks = {agent: count for agent, _, count in self.decision.members}
        total = sum(each.places for each in alive.values())
        if self._cap is not None and total <= self._cap[0]:
            return False
        return any(each.places > ranks.get(agent, 0) for agent, each in alive.items())

    def _next_round(self, alive: Mapping[int, Report], reports: Mapping[int, Report], now: float) -> Decision:
        """Form the next round once the last one has ended everywhere."""
        last = self.decision
        members = [agent for agent, _, _ in last.members]
        if any(each.busy for each in alive.values()):
            return last
        if members:
            ended = self._judge(last, alive, reports)
            if ended is not None:
                return ended
            self.decision = last = Decision(last.round)  # what happened in it is settled
            self._waits_since = None
        if self._waits_since is None:
            self._waits_since = now
        places = {agent: each.places for agent, each in sorted(alive.items())}
        if sum(places.values()) < self.limits.min_ranks:  # better a place whose rank has died than no job
            places = {agent: each.all_places for agent, each in sorted(alive.items())}
        total = sum(places.values())
        waits_s = now - self._waits_since
        if total < self.limits.min_ranks:
            return self._too_few(total, len(places)) if waits_s > self.limits.join_s else last
        known = max((each.round for each in alive.values()), default=0)  # of rounds that an earlier leader formed
        patience_s = min(self.limits.last_call_s, _REGROUP_S) if known else self.limits.last_call_s
        if last.round == 0 and total < self.limits.max_ranks and waits_s < patience_s:
            return last
        return self._form(places, max(known, last.round) + 1)

    def _form(self, places: Mapping[int, int], number: int) -> Decision:
        total = sum(places.values())
        most = self.limits.max_ranks
        if self._cap is not None and total <= self._cap[0]:
            most = self._cap[1]
        else:
            self._cap = None
        members, first = [], 0
        for agent, count in places.items():
            count = min(count, most - first)
            if count:
                members.append([agent, first, count])
                first += count
        if number > 1:
            self._say(f"elastic: round {number} begins with {first} ranks on {_count(len(members), 'machine')}")
        self._waits_since = None
        return Decision(number, RUN, members)

    def _judge(self, last: Decision, alive: Mapping[int, Report], reports: Mapping[int, Report]) -> Decision | None:
        """Look at why a round has ended; return the decision to end the job, or None to go on."""
        lost = [agent for agent, _, _ in last.members if agent not in alive]
        here = [alive[agent] for agent, _, _ in last.members if agent in alive and alive[agent].round == last.round]
        progress = max((each.progress for each in alive.values()), default=0)
        made_progress, self._progress = progress > self._progress, max(progress, self._progress)
        limits = [each.limit for each in here if each.limit is not None]
        if limits:
            self._cap = (last.world_size, limits[0])
        if not lost and all(each.state == LEFT for each in here):
            return self._too_small(limits) if limits and limits[0] < self.limits.min_ranks else None
        ended = [(rank, status) for each in here for rank, status in each.ended]
        deaths = [(rank, status & 0x7F) for rank, status in ended if status & 0x7F]
        self._tell_of(deaths, [reports[agent].host for agent in lost])
        self._failures = 0 if made_progress else self._failures + 1
        if not deaths and not lost and ended and not made_progress:
            return replace(last, order=END, code=max(status >> 8 for _, status in ended) or 1)
        if self._failures > self.limits.max_restarts:
            return replace(
                last,
                order=END,
                code=_SIGNAL_CODE + deaths[0][1] if deaths else 1,
                message=f"{self._failures} rounds in sequence have failed before a new snapshot of the state; look at "
                "why, or give a larger --max-restarts",
            )
        return None

    def _tell_of(self, deaths: list[tuple[int, int]], hosts: list[str]) -> None:
        for rank, number in sorted(deaths):
            self._say(f"elastic: rank {rank} was ended by {signal.Signals(number).name}")
        for host in hosts:
            self._say(f"elastic: the machine {host} is lost")

    def _too_few(self, total: int, num_machines: int) -> Decision:
        return Decision(
            self.decision.round,
            END,
            code=1,
            message=f"{_count(total, 'rank')} on {_count(num_machines, 'machine')} {'is' if total == 1 else 'are'} "
            f"there, fewer than --min-ranks {self.limits.min_ranks}, and no other has joined for "
            f"{self.limits.join_s:g} s; start more agents, or use --min-ranks {max(total, 1)}",
        )

    def _too_small(self, limits: list[int]) -> Decision:
        return Decision(
            self.decision.round,
            END,
            code=1,
            message=f"the layouts that fit need other numbers of ranks than are left: at most {limits[0]} can be used, "
            f"fewer than --min-ranks {self.limits.min_ranks}; start more agents, or use --min-ranks {limits[0]}",
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
