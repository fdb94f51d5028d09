"""The agent of a machine: it follows the leader's decisions, makes them if it leads, and runs the machine's ranks.

The fork server starts them; here they are watched and ended, and the memory is kept that they leave.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from booster.elastic.job_environment import FOLDER, LEAVE, LIMIT, MODULES, VARIABLE, ElasticPlace, note
from booster.elastic.rendezvous import (
    DONE,
    END,
    FAILED,
    IDLE,
    LEFT,
    RUN,
    RUNNING,
    Decision,
    Leader,
    Limits,
    Rendezvous,
    Report,
)
from booster.failure.diagnosis import LEFT as LEFT_CODE

_STOPPED_S = 3.0  # a rank that a signal has stopped for longer is killed


class LocalRanks:
    """Ranks of one round on this machine, each in a place, which is its local rank.

    Args:
        argv: the script, or a module's name, and its arguments.
        is_module: whether `argv` begins with the name of a module.
        statuses: folder for the wait statuses of ranks that have ended.

    Attributes:
        ended: place -> wait status, of ranks that have ended in this round.
        got_sigterm: whether this round's ranks were told to end.
        is_ready: whether the fork server has imported what it was first asked to.
    """

    def __init__(self, argv: Sequence[str], is_module: bool, statuses: Path) -> None:
        self._argv, self._is_module, self._statuses = list(argv), is_module, statuses
        self.pids: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.got_sigterm = self.is_ready = False
        self._received = b""
        self._stopped_since: dict[int, float] = {}
        self._is_starting = False
        self._connect()

    def _connect(self) -> None:
        """Start a fork server."""
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "booster.elastic.fork_server", str(theirs.fileno()), str(self._statuses)],
                pass_fds=[theirs.fileno()],
            )

    def start(self, environments: Mapping[int, Mapping[str, str]]) -> None:
        """Start a rank in each place."""
        self.poll()
        self.ended, self._is_starting, self.got_sigterm = {}, True, False
        if self._server.poll() is not None:  # it was killed
            self._connect()
        self._send({"start": environments, "argv": self._argv, "is_module": self._is_module})

    def import_modules(self, names: Sequence[str]) -> None:
        """Have the fork server import what ranks import, for the next round."""
        self._send({"import": list(names)})

    @property
    def running(self) -> bool:
        """Whether ranks are being started, or run."""
        return self._is_starting or bool(self.pids)

    def poll(self) -> None:
        """Take notice of ranks that have ended; kill those that are stopped."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while data := self._connection.recv(2**20):
                *lines, self._received = (self._received + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
        if self._server.poll() is not None and self.running:  # its end ends all ranks
            self.ended |= dict.fromkeys(self.pids, signal.SIGKILL)
            self.ended = self.ended or {0: signal.SIGKILL}
            self.pids, self._is_starting = {}, False
        self._kill_stopped()

    def signal(self, number: int) -> None:
        """Send a signal to all ranks."""
        self.got_sigterm = True
        self._send({"signal": number})

    def close(self) -> None:
        """End the fork server, which kills what still runs."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(2)
        self._server.kill()
        self._server.wait()

    def _take(self, message: dict) -> None:
        if "started" in message:
            self.pids = {int(place): pid for place, pid in message["started"].items()}
            self._is_starting = False
        elif "imported" in message:
            self.is_ready = True
        else:
            place, pid, status = message["ended"]
            if self.pids.get(int(place)) == pid:
                del self.pids[int(place)]
                self.ended[int(place)] = status

    def _kill_stopped(self) -> None:
        now = time.monotonic()
        for place, pid in self.pids.items():
            if _state(pid) != "T":
                self._stopped_since.pop(place, None)
            elif now - self._stopped_since.setdefault(place, now) > _STOPPED_S:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _send(self, request: dict) -> None:
        self._connection.setblocking(True)
        try:
            with contextlib.suppress(OSError):
                self._connection.sendall(json.dumps(request).encode() + b"\n")
        finally:
            self._connection.setblocking(False)


def _state(pid: int) -> str:
    """Return the state of a process, as in ps: "T" if a signal has stopped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


_PREFIX = "booster-elastic-"
_LOCK, _PIECES = "lock", "pieces"
_SHARED_MEMORY = Path("/dev/shm")


class MachineMemory:
    """A new directory; those of agents that were killed are removed.

    Args:
        parent: where it is created; None for the shared memory of the machine.
    """

    def __init__(self, parent: Path | None = None) -> None:
        if parent is None:
            usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)
            parent = _SHARED_MEMORY if usable else Path(tempfile.gettempdir())
        _remove_unowned(parent)
        new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
        self._lock = _lock(new)
        (new / _PIECES).mkdir()
        self.folder = new.rename(new.with_name(new.name[1:]))  # locked before others can find it

    def newest_snapshot(self) -> int:
        """Return the number of the newest snapshot of which this machine has a part; 0 if there is none."""
        names = os.listdir(self.folder / _PIECES)
        numbers = [name.partition(".")[0] for name in names if name.endswith(".json")]
        return max((int(number) for number in numbers if number), default=0)  # hidden files are being written

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def _lock(folder: Path) -> int | None:
    """Lock a directory until this process ends; return None if another process has locked it.

    In a directory that everyone writes to, others can plant links and directories with any name.

    Raises:
        OSError: it is no directory of this user alone.
    """
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(place)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(f"{folder} belongs to others")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(_LOCK, flags, 0o600, dir_fd=place)
    finally:
        os.close(place)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_unowned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = _lock(folder)
            if descriptor is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)


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
        memory: what outlives ranks.
        rejoin_s: how long the place of a rank that has died stays empty.
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
