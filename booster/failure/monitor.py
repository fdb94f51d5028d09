"""The thread on every rank that finds out that a rank is dead, stopped or does not take part, and ends the job."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from dataclasses import asdict, replace

import torch.distributed as dist

from booster.failure.desync import DesyncDetector, DesyncReport
from booster.failure.failure_report import REPORT_VARIABLE, Failure, ending, is_timeout, ranks_text
from booster.failure.heartbeat import Heartbeat
from booster.failure.operation_log import Operations
from booster.failure.peers import Address, Peer, StoppedPeers
from booster.failure.stack_probe import MainThreadProbe, current_wait, wait_of_error
from booster.failure.store_client import StoreClient
from booster.logging import get_logger

_logger = get_logger(__name__)
_POLL_S = 0.2
_LOOK_S = 0.5
# What a rank gets to end by itself, with its own message and clean-up, before it is ended.
_GRACE_S = 0.5
_CLEANUP_S = 1.0
_STOPPED_S = 3.0
_STORE_LOST_S = 2.0
# What a rank that was told to end by its launcher waits for the reason to become known.
_REASON_S = 1.0
_CAUSE_S = 1.5
_ANSWER_S = 4.0
_INQUIRY_S = 3.5  # for another rank that is finding out; a launcher kills ranks 5 s after it told them to end
_JOIN_POLL_S = 0.05
_TERMINATED = 128 + signal.SIGTERM


class FailureMonitor(threading.Thread):
    """This rank's view of the job's failure.

    Args:
        store: one that all ranks share, for this attempt of the job alone.
        rank, world_size: of this process.
        operations: what its main thread does.
        store_name: host and port of the store, for messages.
        holds_store: whether the store lives in this process.
        heartbeat_s: after how many seconds without a sign another machine counts as lost; 0 for never.
        timeout_s: what a collective waits for at most; so do ranks for one another here.
    Raises:
        TimeoutError: some rank did not join.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        operations: Operations,
        store_name: str,
        holds_store: bool,
        heartbeat_s: float,
        timeout_s: float,
    ) -> None:
        super().__init__(name="booster-failure", daemon=True)
        self.rank, self.world_size, self.operations = rank, world_size, operations
        self.store_name, self.holds_store, self.timeout_s = store_name, holds_store, timeout_s
        addresses = _exchange(store, rank, world_size, Address.own(operations.page), timeout_s)
        own = addresses[rank].machine
        self.peers = [Peer(r, a) for r, a in enumerate(addresses) if a.machine == own and r != rank]
        self.main = MainThreadProbe()
        self.link = StoreClient(store, rank)
        one_machine = len(self.peers) == world_size - 1
        self.inquiries = DesyncDetector(rank, world_size, operations, self.main, one_machine, self._conclude)
        self.link.periodic_tasks.append(self.inquiries.look)
        if not one_machine and heartbeat_s > 0:
            machines = [address.machine for address in addresses]
            self.link.periodic_tasks.append(Heartbeat(rank, machines, heartbeat_s, self._conclude).look)
        self._stopped = threading.Event()
        self._stopped_peers = StoppedPeers(_STOPPED_S)
        self._statuses: dict[int, int | None] = self.inquiries.dead
        self._leave_at: float | None = None
        self._exit_code = 1
        self._signals, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._next_look = 0.0
        self.link.start()
        self.start()

    # ----- for the main thread -----

    @property
    def wake_descriptor(self) -> int:
        """Numbers of signals are written there, one byte each."""
        return self._wake

    def publish(self, failure: Failure) -> Failure:
        """Make it known unless another was; returns the job's first."""
        return self.link.publish(self._with_exit_code(failure))

    def cause_of(self, error: BaseException, failure: Failure) -> Failure:
        """An error of communication mostly follows from what happened to another rank: look for that first."""
        self.main.failed_wait = wait_of_error(error)
        known = self._wait_for_failure(_CAUSE_S)
        if known is not None:
            return known
        dead = [peer for peer in self.peers if peer.ended_well or peer.is_dead()]
        well = next((peer for peer in dead if peer.ended_well or self._statuses.get(peer.rank) == 0), None)
        if well is not None:
            return self._found(well.rank, "has ended", well.phrase())
        if dead:  # the thread that has seen it finds out why
            return self._wait_for_failure(_ANSWER_S + _INQUIRY_S) or failure
        found = self.link.ask(self.inquiries.look_into, DesyncReport(), _ANSWER_S)
        # Where nothing was found another rank is asking around.
        known = self.link.failure or found.mismatch or self._wait_for_failure(0.0 if found.where else _INQUIRY_S)
        if known is not None:
            return known
        if is_timeout(error):
            return self._waited_in_vain(found)
        return self._silence(found) if found.silent else failure

    def _silence(self, found: DesyncReport) -> Failure:
        """Ranks of other machines, whose processes nobody here can look at."""
        first, *rest = found.silent
        more = f" and neither does {ranks_text(rest)}" if rest else ""
        return Failure.found(
            first, f"does not answer any more{more}; rank {self.rank} was {self._doing()}; {found.where}"
        )

    def _waited_in_vain(self, found: DesyncReport) -> Failure:
        wait = self.main.failed_wait
        others = f"; {found.where}" if found.where else ""
        others += f"; {ranks_text(found.silent)} did not answer" if found.silent else ""
        message = (
            f"waited in vain{wait.text().removeprefix('waiting') if wait else ''}, {self.operations.phrase}"
            f"{others}. Collectives wait for timeout_s={self.timeout_s:g}; "
            "use launch_from_torch(timeout_s=...) to change that"
        )
        return Failure.found(self.rank, message, self.operations.phrase)

    def may_speak(self) -> bool:
        """True on one rank of the job, or of this machine where the store is gone: the one that prints the line."""
        pages = {peer.rank: peer.page for peer in self.peers} | {self.rank: self.operations.page}
        page = pages[min(pages)]
        return (page is None or page.take_word()) and self.link.may_speak()

    def leave_soon(self, exit_code: int) -> None:
        """Let the process end by itself; if it does not, end it: an exit handler may wait for a rank that is gone."""
        self._exit_code = exit_code
        self._leave_at = time.monotonic() + _CLEANUP_S

    def say_ended(self, exit_code: int = 0) -> None:
        """The script is over: from now on the end of this process is none that others should worry about.

        Args:
            exit_code: what the script gave to `sys.exit`; that of the job, if somebody waits for this rank.
        """
        if self.operations.page is not None:
            self.operations.page.set_ended(exit_code)
        self.link.ask(self.inquiries.say_ended, None)

    def stop(self) -> None:
        """End the threads, and let the others know if they are about to lose the store."""
        if self.holds_store:
            self.link.announce_end(self.world_size - 1, patience_s=2.0)
        self._stopped.set()
        with contextlib.suppress(OSError):
            os.write(self._wake, b"\0")
        self.join(2.0)
        self.link.stop()

    # ----- the thread -----

    def run(self) -> None:
        self.main.own_threads = {self.native_id, self.link.native_id}
        while not self._stopped.is_set():
            terminated = self._sleep()
            if self._leave_at is not None:
                if time.monotonic() > self._leave_at:
                    exit_now(self._exit_code)
                continue
            if terminated:
                self._end_as_told()
            try:
                self._look()
            except Exception as error:  # the watch must not end because one look went wrong
                _logger.debug("%s: %s", type(error).__name__, error)

    def _sleep(self) -> bool:
        """Until something happens, for 0.2 s at most; whether the launcher told this process to end."""
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        for peer in self.peers:
            if peer.handle is not None and peer.rank not in self._statuses:
                poll.register(peer.handle, select.POLLIN)
        poll.poll(_POLL_S * 1000)
        with contextlib.suppress(BlockingIOError):
            return signal.SIGTERM in os.read(self._signals, 64)
        return False

    def _look(self) -> None:
        self._look_at_peers()
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            self.main.look()
            if self.operations.page is not None:
                self.operations.page.place = self.main.wait.text() if self.main.wait else ""
        lost = self.link.lost_since
        if self.link.failure is None and lost is not None and now - lost > _STORE_LOST_S and not self._store_may_go():
            self._conclude(self._loss_of_store())
        failure = self.link.failure
        # A rank that raised ends by itself, after what clean-up it has; one of which others found out does not.
        if failure is not None and (failure.rank != self.rank or not failure.kind):
            self._follow(failure)

    def _look_at_peers(self) -> None:
        for peer in self.peers:
            if peer.rank not in self._statuses and peer.is_dead():
                status = self._statuses[peer.rank] = peer.status()
                if not peer.ended_well and status != 0 and not self._has_spoken():
                    self._conclude(self._mismatch_behind(status) or self._death(peer, status))
        stopped = self._stopped_peers.look([peer for peer in self.peers if peer.rank not in self._statuses])
        if stopped is not None:
            self._conclude(self._found(stopped.rank, "is stopped (SIGSTOP)", stopped.phrase()))
            stopped.kill()

    def _has_spoken(self) -> bool:
        """Whether a failure is known, now that a process has ended: it may have said why itself."""
        if self.link.failure is None:
            self.link.refresh()
        return self.link.failure is not None

    def _mismatch_behind(self, status: int | None) -> Failure | None:
        """Gloo aborts a process that receives more than it asked for: who called something else is at fault."""
        if status is None or status & 0x7F != signal.SIGABRT:
            return None
        found = self.link.ask(self.inquiries.look_into, DesyncReport(), _ANSWER_S)
        return found.mismatch or self._wait_for_failure(0.0 if found.where else _INQUIRY_S)

    def _wait_for_failure(self, limit_s: float) -> Failure | None:
        """Another rank may be finding out."""
        until = time.monotonic() + limit_s
        while self.link.failure is None and time.monotonic() < until:
            self.link.refresh()
            time.sleep(0.05)
        return self.link.failure

    def _death(self, peer: Peer, status: int | None) -> Failure:
        how = ending(status)
        why = "; if nobody sent SIGKILL, the system ran out of memory" if "SIGKILL" in how else ""
        found = self._found(peer.rank, how, peer.phrase())
        return replace(found, message=found.message + why)

    def _found(self, rank: int, what: str, phrase: str) -> Failure:
        """The line about a rank, with what the ranks of this machine were doing."""
        others = {peer.rank: peer.phrase() for peer in self.peers if peer.rank != rank and not peer.ended_well}
        others[self.rank] = self._doing()
        together: dict[str, list[int]] = {}
        for other, doing in others.items():
            together.setdefault(doing, []).append(other)
        rest = " and ".join(
            f"{ranks_text(ranks)} {'was' if len(ranks) == 1 else 'were'} {doing}"
            for doing, ranks in sorted(together.items(), key=lambda item: min(item[1]))
        )
        return Failure.found(rank, f"{what} {phrase}".rstrip() + f"; {rest}", phrase)

    def _doing(self) -> str:
        """What this rank does, in words."""
        wait = self.main.failed_wait or current_wait()
        return f"{self.operations.phrase}, {wait.text()}" if wait else self.operations.phrase

    def _store_may_go(self) -> bool:
        holder = next((peer for peer in self.peers if peer.rank == 0), None)
        return self.link.closing or (holder is not None and holder.ended_well)

    def _loss_of_store(self) -> Failure:
        return Failure.found(
            self.rank,
            f"lost the job's store at {self.store_name}: the process that holds it (torchrun's agent, or rank 0 where "
            f"ranks are started by hand) has ended; this rank was {self._doing()}",
            self.operations.phrase,
        )

    def _conclude(self, failure: Failure) -> None:
        """A failure was found; the first of the job is what counts."""
        failure = self._with_exit_code(failure)
        if threading.current_thread() is self.link:
            self.link.publish_here(failure)
        else:
            self.link.publish(failure)

    def _with_exit_code(self, failure: Failure) -> Failure:
        """What was found out about a rank of this machine that ended by `sys.exit`, with what it gave to that."""
        pages = (peer.page for peer in self.peers if peer.rank == failure.rank and peer.ended_well)
        code = next((page.exit_code for page in pages), 0)
        if not code or failure.kind:
            return failure
        return replace(failure, message=f"called sys.exit({code}): it {failure.message}", exit_code=code)

    def _end_as_told(self) -> None:
        """SIGTERM: the launcher knows that a rank has ended, but not why. Say it, if anything is known by now."""
        until = time.monotonic() + _REASON_S
        while self.link.failure is None and time.monotonic() < until:
            self.link.refresh()
            self._look_at_peers()
            if not any(peer.is_dead() for peer in self.peers):
                break
            time.sleep(0.05)
        if self.link.failure is None:
            exit_now(_TERMINATED)
        self._follow(self.link.failure)

    def _follow(self, failure: Failure) -> None:
        """End this rank because another failed, unless the main thread is ending already."""
        if self._stopped.wait(_GRACE_S) or self._leave_at is not None:
            return
        if self.may_speak():
            say(failure.line())
        exit_now(failure.exit_code)


def _exchange(store: dist.Store, rank: int, world_size: int, own: Address, timeout_s: float) -> list[Address]:
    """Every rank's address; waits for all of them."""
    keys = [f"address/{other}" for other in range(world_size)]
    store.set(keys[rank], json.dumps(asdict(own)))
    until = time.monotonic() + timeout_s
    while not store.check(keys):
        if time.monotonic() > until:
            absent = [other for other, key in enumerate(keys) if not store.check([key])]
            raise TimeoutError(
                f"{ranks_text(absent)} did not join the job within timeout_s={timeout_s:g}; look at why, or give a "
                "longer time in launch_from_torch(timeout_s=...)"
            )
        time.sleep(_JOIN_POLL_S)
    return [Address(**json.loads(text)) for text in store.multi_get(keys)]


def say(line: str) -> None:
    """One write, so that lines of two ranks cannot mix."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    path = os.environ.get(REPORT_VARIABLE, "")
    if path:
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def exit_now(code: int) -> None:
    """End the process without any clean-up that could wait for another rank."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
