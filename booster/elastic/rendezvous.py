"""Where agents meet: a store that the leader holds, what they write into it, and what the leader decides from that.

Its decisions: who takes part in a round, when the round ends, and when the job does.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from booster.elastic.job_environment import Message
from booster.errors import ConfigurationError
from booster.network import address_to_listen, hold_store, is_loopback

IDLE, RUNNING, FAILED, LEFT, DONE = "idle", "running", "failed", "left", "done"
RUN, STOP, END = "run", "stop", "end"


@dataclass(frozen=True)
class Report(Message):
    """State of an agent."""

    beat: int = 0  # grows with each report
    host: str = ""  # name of the machine, for people
    places: int = 0  # number of ranks that it can start now
    all_places: int = 0  # the same, with places whose rank has died a short time ago
    state: str = IDLE  # "idle", "running", "failed" (a rank has), "left" (all ranks have, at a step boundary) or "done"
    round: int = 0  # round that the state is about
    busy: bool = False  # whether ranks of it still run
    ended: list[list[int]] = field(default_factory=list)  # [rank, wait status] of its ranks that failed in that round
    progress: int = 0  # number of the newest snapshot on the machine
    limit: int | None = None  # how many ranks at most a rank has asked for in that round


@dataclass(frozen=True)
class Decision(Message):
    """What the leader wants all agents to do."""

    round: int = 0  # number of the round, from 1; 0 before the first
    order: str = STOP  # "run" the round, "stop" its ranks, or "end" the job
    # [agent, first rank, number of ranks] of each machine of the round
    members: list[list[int]] = field(default_factory=list)
    leaves: bool = False  # whether the round is to end at its next step boundary, because others want to join
    code: int = 0  # exit code of the job that ends
    message: str = ""  # why it ends; "" if the ranks have said it, or it was a success

    @property
    def world_size(self) -> int:
        """Number of ranks of the round."""
        return sum(count for _, _, count in self.members)


# Environment variable of the agents: what only the machines of the job know.
SECRET_VARIABLE = "BOOSTER_ELASTIC_SECRET"
_SIGNATURE_BYTES = hashlib.sha256().digest_size
_CONNECT_S = 2.0
_SILENCE_S = 3.0  # that the machine of the store may not answer
_POLL_S = 0.1
_LEADER, _COUNT, _DECISION, _JOB, _MODULES = "leader", "count", "decision", "job", "modules"


@dataclass(frozen=True)
class Endpoint:
    """Host name or address, and port, of a store."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read `HOST:PORT`."""
        host, _, port = text.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigurationError(
                f"--rdzv-endpoint={text} is not HOST:PORT, or several of them with commas; use one such as node1:29400"
            )
        return cls(host, int(port))

    def is_here(self) -> bool:
        """Return whether this machine has the address."""
        with contextlib.suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM):
                with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                    probe.bind(address)
                    return True
        return False

    def is_of_one_machine(self) -> bool:
        """Return whether only processes of this machine reach the address."""
        address = address_to_listen(self.host)
        return bool(address) and is_loopback(address)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def _limit_silence(port: int) -> None:
    """Have the kernel end connections to a store whose machine does not answer: its client would wait on."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not os.readlink(path).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as connection:
                is_of_network = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_of_network and connection.getpeername()[1] == port:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_SILENCE_S * 1000))


class Rendezvous:
    """An agent's connection to the store of its job.

    Any client of a store can read and write it. What agents tell each other is signed (HMAC-SHA256) with the secret,
    the name of the job and the key, and followed only if the signature is right.

    Args:
        endpoints: where the store may be, in order: the first that answers, else the first on this machine.
        job_id: name of the job, which keeps jobs in one store apart.
        fingerprint: what all agents of a job have in common.
        timeout_s: how long to wait for another machine to hold the store.
        secret: known to the agents of the job alone; "" for none.

    Attributes:
        number: number of this agent among all that the store has seen.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        job_id: str,
        fingerprint: Mapping[str, str],
        timeout_s: float,
        secret: str = "",
    ) -> None:
        self._endpoints, self._job_id, self._fingerprint = endpoints, job_id, dict(fingerprint)
        self._secret = hashlib.sha256(json.dumps([secret, job_id]).encode()).digest()
        self._server: dist.Store | None = None
        self.number, self.leads = 0, False
        self.meet(timeout_s, waits=False)

    def meet(self, timeout_s: float, waits: bool = True) -> None:
        """Find the store, or hold it, also after it was lost; `waits`: for machines earlier in the list."""
        self._server, self.leads = None, False
        until = time.monotonic() + timeout_s
        own = next((index for index, each in enumerate(self._endpoints) if each.is_here()), None)
        may_hold_at = time.monotonic() + (own if own is not None and waits else 0) * _CONNECT_S
        while True:
            if any(self._join(endpoint) for endpoint in self._endpoints):
                return
            # At the start of a job only the first holds it: others may be there earlier.
            may_hold = own is not None and time.monotonic() >= may_hold_at and (own == 0 or waits)
            if may_hold and self._hold(self._endpoints[own]):
                return
            if time.monotonic() > until:
                raise ConfigurationError(
                    f"no agent of the job answers at {', '.join(map(str, self._endpoints))}; start one on the first of "
                    "these machines, or give --rdzv-endpoint the name by which it knows itself"
                )
            time.sleep(_POLL_S)

    def _join(self, endpoint: Endpoint) -> bool:
        try:
            with socket.create_connection((endpoint.host, endpoint.port), _CONNECT_S):
                pass
            timeout = timedelta(seconds=_CONNECT_S)
            store = dist.TCPStore(endpoint.host, endpoint.port, None, False, timeout, wait_for_workers=False)
            _limit_silence(endpoint.port)
            if not store.check([_JOB]):
                return False
            found = store.get(_JOB).decode()
        except (OSError, dist.DistError):
            return False
        if found != self._job_id:
            raise ConfigurationError(
                f"another job (--rdzv-id {found}) is at {endpoint}; give each job an --rdzv-endpoint of its own"
            )
        self._enter(store, endpoint)
        theirs = json.loads(self._read(_LEADER))
        for name, own in self._fingerprint.items():
            if theirs.get(name) != own:
                raise ConfigurationError(
                    f"the job at {endpoint} has the {name} {theirs.get(name)}, and this machine {own}; start the same "
                    "on all machines, and give another job another --rdzv-endpoint"
                )
        return True

    def _hold(self, endpoint: Endpoint) -> bool:
        try:
            self._server = hold_store(endpoint.host, endpoint.port)
        except (OSError, dist.DistError):
            return False
        self.leads = True
        self._enter(self._server, endpoint)
        self._write(_LEADER, json.dumps(self._fingerprint))
        self.decide(Decision())
        self._server.set(_JOB, self._job_id)  # the last: now others find all of it
        return True

    def _enter(self, store: dist.Store, endpoint: Endpoint) -> None:
        self._store, self.endpoint = store, endpoint
        self.number = store.add(_COUNT, 1)

    # ----- messages; all raise DistError or ConnectionError once the store is lost -----

    def _write(self, key: str, text: str) -> None:
        self._store.set(key, self._signature(key, text.encode()) + text.encode())

    def _read(self, key: str) -> bytes:
        text = self._signed(key, self._store.get(key))
        if text is None:
            raise ConfigurationError(
                f"'{key}' in the store at {self.endpoint} is not signed with this machine's {SECRET_VARIABLE}; set the "
                "same on all machines of the job, and no other process should reach the port"
            )
        return text

    def _signed(self, key: str, message: bytes) -> bytes | None:
        """Return the text of a message; None if no agent of this job has written it."""
        signature, text = message[:_SIGNATURE_BYTES], message[_SIGNATURE_BYTES:]
        return text if hmac.compare_digest(signature, self._signature(key, text)) else None

    def _signature(self, key: str, text: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + text, "sha256")

    def report(self, report: Report) -> None:
        """Tell the leader the state of this agent."""
        self._write(f"report/{self.number}", report.to_json())

    def reports(self) -> dict[int, Report]:
        """Return the newest reports of all agents."""
        keys = {number: f"report/{number}" for number in range(1, self._store.add(_COUNT, 0) + 1)}
        there = {number: key for number, key in keys.items() if self._store.check([key])}
        messages = self._store.multi_get(list(there.values())) if there else []
        texts = {number: self._signed(there[number], each) for number, each in zip(there, messages, strict=True)}
        return {number: Report.from_json(text) for number, text in texts.items() if text is not None}

    def tell_modules(self, names: Sequence[str]) -> None:
        """Tell machines that join later which modules ranks import."""
        self._write(_MODULES, json.dumps(list(names)))

    def modules(self) -> list[str]:
        """Return the modules that ranks import; none before an agent has told."""
        return json.loads(self._read(_MODULES)) if self._store.check([_MODULES]) else []

    def decide(self, decision: Decision) -> None:
        """Tell all agents what to do."""
        self._write(_DECISION, decision.to_json())

    def decision(self) -> Decision:
        """Return what the leader wants."""
        return Decision.from_json(self._read(_DECISION))


_SIGNAL_CODE = 128
_REGROUP_S = 3.0  # that agents need to find a new leader


@dataclass(frozen=True)
class Limits:
    """Numbers that the user may choose."""

    min_ranks: int
    max_ranks: int
    join_s: float = 600.0  # how long the job waits for `min_ranks`
    last_call_s: float = 30.0  # how long the first round waits for `max_ranks` once `min_ranks` are there
    lost_s: float = 4.0  # how long an agent may send no report
    max_restarts: int = 10  # rounds in sequence that may fail without a new snapshot


class Leader:
    """Decides from the reports of all agents; it has no state that its successor could not find in them."""

    def __init__(self, limits: Limits, say: Callable[[str], None]) -> None:
        self.limits, self._say = limits, say
        self.decision = Decision()
        self._seen: dict[int, tuple[int, float]] = {}
        self._waits_since: float | None = None
        self._failures, self._progress = 0, 0
        self._cap: tuple[int, int] | None = None  # (ranks that there were, ranks at most)

    def decide(self, reports: Mapping[int, Report], now: float) -> Decision:
        """Return the decision after new reports (agent -> its newest); `now`: monotonic time, in seconds."""
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
