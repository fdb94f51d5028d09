"""The thread on every rank that detects dead, stopped or desynchronized ranks, and ends the job."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import torch.distributed as dist

from booster.failure import diagnosis
from booster.failure.desync import DesyncDetector, DesyncReport
from booster.failure.diagnosis import Failure
from booster.failure.machine_links import OtherMachines
from booster.failure.operation_log import Operations
from booster.failure.peers import Address, Peer, Requests, StoppedPeers, StoreClient
from booster.failure.stack_probe import MainThreadProbe, current_wait, wait_of_error
from booster.logging import get_logger

_logger = get_logger(__name__)
_POLL_S = 0.2
_LOOK_S = 0.5
# Time that a rank has to end by itself, with its own message and clean-up, before it is forced to end.
_GRACE_S = 0.5
_CLEANUP_S = 1.0
# Time that the rank with the store gives the others to end: c10d prints a stack trace on a rank whose store is gone.
_OUTLAST_S = 1.5
_STOPPED_S = 3.0
_STORE_LOST_S = 2.0
# Time that a rank waits for the reason to become known after its launcher told it to end.
_REASON_S = 1.0
# Time in which all ranks get the SIGTERM that one of them got, if they are to get it.
_TOLD_S = 2.0
_CAUSE_S = 1.5
_ANSWER_S = 4.0
_INQUIRY_S = 3.5  # for another rank's diagnosis; a launcher kills ranks 5 s after SIGTERM
_JOIN_POLL_S = 0.05
_TERMINATED = 128 + signal.SIGTERM
end_process = os._exit  # Python's own; scripts get another


class FailureMonitor(threading.Thread):
    """Failure monitor thread of this rank.

    Args:
        store: store shared by all ranks, used only for this attempt of the job.
        store_name: host and port of the store, for messages.
        heartbeat_s: seconds without a heartbeat after which another machine counts as lost; 0 for never.
        timeout_s: timeout of a collective; also the longest wait here for all ranks to join.

    Attributes:
        may_end: whether SIGTERM ends the process, that is, the script has set no handler since.

    Raises:
        TimeoutError: a rank did not join in time.
    """

    may_end: Callable[[], bool] = staticmethod(lambda: True)

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
        machines, host = [address.machine for address in addresses], store_name.rpartition(":")[0]
        self.machines = OtherMachines(rank, machines, host, heartbeat_s, self._conclude)
        self.link.periodic_tasks.append(self.machines.look)
        self.requests = Requests(self.link, self.inquiries, rank, world_size, self.peers)
        self._stopped, self._speaking = threading.Event(), threading.Lock()
        self._stopped_peers = StoppedPeers(_STOPPED_S)
        self._statuses: dict[int, int | None] = self.inquiries.dead
        self._told: dict[int, float] = {}  # rank that ended because of SIGTERM -> when that was seen
        self._is_told = False
        self._leave_at: float | None = None
        self._exit_code = 1
        self._signals, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._next_look = 0.0
        self.link.start()
        self.start()

    # ----- for the main thread -----

    @property
    def wake_descriptor(self) -> int:
        """File descriptor to which signal numbers are written, one byte each."""
        return self._wake

    def wake(self, number: int) -> None:
        """Tell the thread of a signal, from its handler."""
        with contextlib.suppress(OSError):
            os.write(self._wake, bytes([number]))

    def publish(self, failure: Failure) -> Failure:
        """Publish a failure unless one was published before; return the job's first failure."""
        return self.link.publish(self._explained(failure))

    def cause_of(self, error: BaseException, failure: Failure) -> Failure:
        """Find the cause of a communication error, which mostly follows from the failure of another rank.

        Returns:
            The failure of the other rank, or `failure` if there is none.
        """
        self.main.failed_wait = wait_of_error(error)
        known = self._wait_for_failure(self.machines.silence_s if diagnosis.is_unanswered(error) else _CAUSE_S)
        if known is not None:
            return known
        dead = [peer for peer in self.peers if peer.ended_well or peer.is_dead()]
        well = next((peer for peer in dead if peer.ended_well or self._statuses.get(peer.rank) == 0), None)
        if well is not None:
            return self._found(well.rank, "has ended", well.phrase())
        if dead:  # the monitor thread that saw it determines the cause
            return self._wait_for_failure(_ANSWER_S + _INQUIRY_S) or failure
        found = self.link.ask(self.inquiries.look_into, DesyncReport(), _ANSWER_S)
        # An empty report mostly means that another rank leads an inquiry.
        known = self.link.failure or found.mismatch or self._wait_for_failure(0.0 if found.where else _INQUIRY_S)
        if known is not None:
            return known
        if diagnosis.is_timeout(error) and not (diagnosis.is_unanswered(error) and found.silent):
            return self._unanswered_wait(found)
        return self._silence(found) if found.silent else failure

    def _silence(self, found: DesyncReport) -> Failure:
        """Return the failure for ranks that do not answer and whose processes run on other machines."""
        first, *rest = found.silent
        more = f" and neither does {diagnosis.ranks_text(rest)}" if rest else ""
        return Failure.found(
            first, f"does not answer any more{more}; rank {self.rank} was {self._doing()}; {found.where}"
        )

    def _unanswered_wait(self, found: DesyncReport) -> Failure:
        wait = self.main.failed_wait
        others = f"; {found.where}" if found.where else ""
        others += f"; {diagnosis.ranks_text(found.silent)} did not answer" if found.silent else ""
        message = (
            f"waited without an answer{wait.text().removeprefix('waiting') if wait else ''}, {self.operations.phrase}"
            f"{others}. Collectives wait for timeout_s={self.timeout_s:g}; "
            "use launch_from_torch(timeout_s=...) to change that"
        )
        return Failure.found(self.rank, message, self.operations.phrase)

    def say_once(self, line: str) -> None:
        """Print a line on one rank of the job only (of this machine if the store is gone)."""
        pages = {peer.rank: peer.page for peer in self.peers} | {self.rank: self.operations.page}
        page = pages[min(pages)]
        # The main thread, which may come second, must not end the process before the line is out.
        with self._speaking:
            if (page is None or page.claim_report()) and self.link.may_speak():
                say(line)

    def leave_soon(self, exit_code: int) -> None:
        """End the process if it does not end by itself soon: an exit handler may wait for a lost rank."""
        self._exit_code = exit_code
        self._leave_at = time.monotonic() + _CLEANUP_S

    def outlast_peers(self, failure: Failure) -> None:
        """Wait until the other ranks have ended, for 1.5 s at most, if this process hosts the store that they ask.

        Not for a rank that raised the error: it may go on for as long as it likes.
        """
        until = time.monotonic() + _OUTLAST_S
        one_machine = len(self.peers) == self.world_size - 1
        others = [peer for peer in self.peers if peer.rank != failure.rank or not failure.kind]
        while self.holds_store and time.monotonic() < until:
            if one_machine and all(peer.is_dead() for peer in others):
                return
            time.sleep(_JOIN_POLL_S)

    def say_ended(self, exit_code: int = 0) -> None:
        """Record the script's end, no failure; `exit_code`: of `sys.exit`, the job's if a rank waits for this."""
        if self.operations.page is not None:
            self.operations.page.set_ended(exit_code)
        self.link.ask(self.inquiries.say_ended, None)

    def stop(self) -> None:
        """Stop the threads; tell the other ranks first if this process hosts the store."""
        if self.holds_store:
            self.link.announce_end(self.world_size - 1, patience_s=2.0)
        self._stopped.set()
        self.wake(0)
        self.join(2.0)
        self.link.stop()

    # ----- the thread -----

    def run(self) -> None:
        """Check the peers, the main thread and the store until `stop`; end the process once the job has failed."""
        self.main.own_threads = {self.native_id, self.link.native_id}
        while not self._stopped.is_set():
            terminated = self._sleep()
            if self._leave_at is not None:
                if time.monotonic() > self._leave_at:
                    exit_now(self._exit_code)
                continue
            if terminated:
                self._end_on_signal()
            try:
                self._look()
            except Exception as error:  # one failed check must not end the monitor
                _logger.debug("%s: %s", type(error).__name__, error)

    def _sleep(self) -> bool:
        """Sleep until an event, for 0.2 s at most; return whether the launcher told this process to end."""
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        for peer in self.peers:
            if peer.handle is not None and peer.rank not in self._statuses:
                poll.register(peer.handle, select.POLLIN)
        for descriptor in self.machines.descriptors():
            poll.register(descriptor, select.POLLIN)
        poll.poll(_POLL_S * 1000)
        with contextlib.suppress(BlockingIOError):
            return signal.SIGTERM in os.read(self._signals, 64) and self.may_end()
        return False

    def _look(self) -> None:
        self._look_at_peers()
        self.machines.watch()
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
        # A rank that raised ends by itself after its clean-up; a rank whose failure others detected does not.
        if failure is not None and (failure.rank != self.rank or not failure.kind):
            self._follow(failure)

    def _look_at_peers(self) -> None:
        for peer in self.peers:
            if peer.rank not in self._statuses and peer.is_dead():
                status = self._statuses[peer.rank] = peer.status()
                if peer.got_sigterm(status):
                    self._told[peer.rank] = time.monotonic()
                elif not peer.ended_well and status != 0 and not self._has_spoken():
                    self._conclude(self._mismatch_behind(status) or self._death(peer, status))
            elif time.monotonic() - self._told.get(peer.rank, float("inf")) > _TOLD_S and not self._is_told:
                del self._told[peer.rank]
                if not self._has_spoken():  # SIGTERM was meant for that rank alone
                    self._conclude(self._death(peer, self._statuses[peer.rank]))
        stopped = self._stopped_peers.look([peer for peer in self.peers if peer.rank not in self._statuses])
        if stopped is not None:
            self._conclude(self._found(stopped.rank, "is stopped (SIGSTOP)", stopped.phrase()))
            stopped.kill()

    def _has_spoken(self) -> bool:
        """Return whether a failure is known; a process that has ended may have published the reason itself."""
        if self.link.failure is None:
            self.link.refresh()
        return self.link.failure is not None

    def _mismatch_behind(self, status: int | None) -> Failure | None:
        """Return the collective mismatch behind a SIGABRT, if any: gloo aborts a process that receives too much."""
        if status is None or status & 0x7F != signal.SIGABRT:
            return None
        found = self.link.ask(self.inquiries.look_into, DesyncReport(), _ANSWER_S)
        return found.mismatch or self._wait_for_failure(0.0 if found.where else _INQUIRY_S)

    def _wait_for_failure(self, limit_s: float) -> Failure | None:
        """Wait up to `limit_s` for another rank to publish a failure."""
        until = time.monotonic() + limit_s
        while self.link.failure is None and time.monotonic() < until:
            self.link.refresh()
            time.sleep(0.05)
        return self.link.failure

    def _death(self, peer: Peer, status: int | None) -> Failure:
        how = diagnosis.ending(status)
        why = "; if no one sent SIGKILL, the system ran out of memory" if "SIGKILL" in how else ""
        found = self._found(peer.rank, how, peer.phrase())
        return replace(found, message=found.message + why)

    def _found(self, rank: int, what: str, phrase: str) -> Failure:
        """Return the failure of a rank; its message says what the ranks of this machine were doing."""
        others = {peer.rank: peer.phrase() for peer in self.peers if peer.rank != rank and not peer.ended_well}
        others[self.rank] = self._doing()
        together: dict[str, list[int]] = {}
        for other, doing in others.items():
            together.setdefault(doing, []).append(other)
        rest = " and ".join(
            f"{diagnosis.ranks_text(ranks)} {'was' if len(ranks) == 1 else 'were'} {doing}"
            for doing, ranks in sorted(together.items(), key=lambda item: min(item[1]))
        )
        return Failure.found(rank, f"{what} {phrase}".rstrip() + f"; {rest}", phrase)

    def _doing(self) -> str:
        """Describe what this rank is doing."""
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
        """Publish a failure that was detected; only the first failure of the job counts."""
        failure = self._explained(failure)
        if threading.current_thread() is self.link:
            self.link.publish_here(failure)
        else:
            self.link.publish(failure)

    def _explained(self, failure: Failure) -> Failure:
        """Add what the pages of this machine's ranks tell: the exit code of `sys.exit`, or batches that differ."""
        batches = {peer.rank: peer.page.batch for peer in self.peers if peer.page is not None}
        own = "" if self.operations.page is None else self.operations.page.batch
        problem = "" if failure.is_users else diagnosis.diagnose_batches({self.rank: own, **batches})
        if problem:
            place = f" ({failure.operation})" if failure.operation else ""
            return replace(failure, message=f"{problem}{place}", is_users=True)
        pages = (peer.page for peer in self.peers if peer.rank == failure.rank and peer.ended_well)
        code = next((page.exit_code for page in pages), 0)
        if not code or failure.kind:
            return failure
        return replace(failure, message=f"called sys.exit({code}): it {failure.message}", exit_code=code)

    def _end_on_signal(self) -> None:
        """End after SIGTERM: the launcher knows that a rank has ended, but not why. Print the reason if it is known.

        Other ranks that got the signal too are no reason: all get it where the user ends the job.
        """
        self._is_told = True
        if self.operations.page is not None:
            self.operations.page.set_got_sigterm()
        until = time.monotonic() + _REASON_S
        while self.link.failure is None and time.monotonic() < until:
            self.link.refresh()
            self._look_at_peers()
            if not any(peer.is_dead() and peer.rank not in self._told for peer in self.peers):
                break
            time.sleep(0.05)
        if self.link.failure is None:
            exit_now(_TERMINATED)
        self._follow(self.link.failure)

    def _follow(self, failure: Failure) -> None:
        """End this rank because another one failed, unless the main thread is ending already."""
        if self._stopped.wait(_GRACE_S) or self._leave_at is not None:
            return
        self.say_once(failure.line())
        self.outlast_peers(failure)
        exit_now(failure.exit_code)


def _exchange(store: dist.Store, rank: int, world_size: int, own: Address, timeout_s: float) -> list[Address]:
    """Publish this rank's address; wait for the addresses of all ranks and return them."""
    keys = [f"address/{other}" for other in range(world_size)]
    store.set(keys[rank], json.dumps(asdict(own)))
    until = time.monotonic() + timeout_s
    while not store.check(keys):
        if time.monotonic() > until:
            absent = [other for other, key in enumerate(keys) if not store.check([key])]
            raise TimeoutError(
                f"{diagnosis.ranks_text(absent)} did not join the job within timeout_s={timeout_s:g}; look at why, or "
                "give a longer time in launch_from_torch(timeout_s=...)"
            )
        time.sleep(_JOIN_POLL_S)
    return [Address(**json.loads(text)) for text in store.multi_get(keys)]


def say(line: str) -> None:
    """Print a line to stderr, and to the report file if there is one; in one write, so that lines cannot mix."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    path = os.environ.get(diagnosis.REPORT_VARIABLE, "")
    if path:
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def exit_now(code: int) -> None:
    """End the process without any clean-up that could wait for another rank."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    end_process(code)
