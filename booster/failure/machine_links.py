"""Connections between neighbouring machines that carry nothing: their kernels ask each other whether they are there.

The kernel answers TCP's probes whatever its processes do, so a call that holds the interpreter lock for minutes is not
taken for a loss, and a few seconds of silence are enough: the machine has lost its power, or the link between the two
is cut, in one direction or in both. The machines form a ring.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable

import torch.distributed as dist

from booster.failure.diagnosis import Failure, ranks_text
from booster.network import address_towards, is_loopback, listener

_BEATS_PER_LIMIT = 12


class _Machines:
    """The machines of a job and the ranks of each, for what watches that the others are there.

    Args:
        machines: that of each rank, as `peers.machine` names it.
        limit_s: seconds without a sign after which a machine counts as lost.
    """

    def __init__(self, rank: int, machines: list[str], limit_s: float, report: Callable[[Failure], None]) -> None:
        self.limit_s, self._report = limit_s, report
        names = list(dict.fromkeys(machines))
        self._names = [name.partition("/")[0] for name in names]
        self._ranks = [[r for r, name in enumerate(machines) if name == own] for own in names]
        self._own = names.index(machines[rank])

    def _lost(self, machine: int, what: str) -> Failure:
        first, *rest = self._ranks[machine]
        others = f", with {ranks_text(self._ranks[machine])}," if rest else ""
        return Failure.found(first, f"on machine {self._names[machine]}{others} {what}")


class Heartbeat(_Machines):
    """Heartbeat sender and checker; a periodic task of the store client."""

    def __init__(self, rank: int, machines: list[str], limit_s: float, report: Callable[[Failure], None]) -> None:
        super().__init__(rank, machines, limit_s, report)
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
        for machine, ranks in enumerate(self._ranks):
            if machine == self._own or all(store.check([f"ended/{rank}"]) for rank in ranks):
                continue
            beats = store.add(f"beat/{machine}", 0)
            last, since = self._seen.get(machine, (-1, now))
            self._seen[machine] = (beats, since if beats == last else now)
            if now - self._seen[machine][1] > self.limit_s:
                self._report(self._lost(machine, f"has not been heard of for {self.limit_s:g} s"))


_SILENCE = 1 / 7.5  # of the limit of heartbeats: how long the kernel of another machine may be silent
_PROBE_S = 1
_CONNECT_S = 2.0
_TOKEN_BYTES = 16
_LAST_ACK = 56  # offset of tcpi_last_ack_recv, in milliseconds, in Linux's struct tcp_info
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_NOT_HEARD = b"?"  # sent to a machine that is silent, in case that only its own words are lost


class OtherMachines:
    """What tells that another machine is lost: heartbeats over the store, and connections between neighbours.

    Args:
        heartbeat_s: seconds without a heartbeat after which a machine counts as lost; 0 for never.

    Attributes:
        silence_s: seconds after which a silent machine has been reported.
    """

    def __init__(
        self, rank: int, machines: list[str], store_host: str, heartbeat_s: float, report: Callable[[Failure], None]
    ) -> None:
        watched = heartbeat_s > 0 and len(set(machines)) > 1
        self.silence_s = heartbeat_s * _SILENCE + 2 * _PROBE_S
        self._heartbeat = Heartbeat(rank, machines, heartbeat_s, report) if watched else None
        self._links = MachineLinks(rank, machines, store_host, heartbeat_s * _SILENCE, report) if watched else None

    def look(self, store: dist.Store) -> None:
        """Do what needs the store; a periodic task of the store client."""
        if self._heartbeat is not None and self._links is not None:
            self._heartbeat.look(store)
            self._links.look(store)

    def descriptors(self) -> list[int]:
        """Return what `watch` should be called for when it becomes readable."""
        return [] if self._links is None else self._links.descriptors()

    def watch(self) -> None:
        """Report a machine whose kernel does not answer."""
        if self._links is not None:
            self._links.watch()


class MachineLinks(_Machines):
    """This rank's connections to the next machine and from the one before.

    One rank of each machine has them. They are made by a periodic task of the store client (`look`) and watched by
    `watch`, which another thread may call.
    """

    def __init__(
        self, rank: int, machines: list[str], store_host: str, limit_s: float, report: Callable[[Failure], None]
    ) -> None:
        super().__init__(rank, machines, limit_s, report)
        self._store_host = store_host
        self._leads = rank == self._ranks[self._own][0]
        count = len(self._names)
        # Of two machines, one connection is enough.
        self._next = (self._own + 1) % count if count > 2 or self._own == 1 else None
        self._token = b""
        self._listener: socket.socket | None = None
        self._links: dict[socket.socket, int] = {}  # connection -> the other machine

    def look(self, store: dist.Store) -> None:
        """Tell the others where this machine listens, and connect to the next one once it has told."""
        if not self._leads:
            return
        if self._listener is None:
            own = address_towards(self._store_host) or ""
            host = "" if not own or is_loopback(own) else own  # the store's machine is known by the store's address
            self._listener = listener(host)
            self._token = secrets.token_bytes(_TOKEN_BYTES)
            store.set(f"link/{self._own}", f"{host} {self._listener.getsockname()[1]} {self._token.hex()}")
        if self._next is not None and store.check([f"link/{self._next}"]):
            host, port, token = store.get(f"link/{self._next}").decode().split(" ")
            target, self._next = self._next, None
            with contextlib.suppress(OSError):  # a firewall: heartbeats remain
                link = socket.create_connection((host or self._store_host, int(port)), _CONNECT_S)
                link.sendall(bytes.fromhex(token) + bytes([self._own % 256]))
                self._add(link, target)

    def descriptors(self) -> list[int]:
        """Return what `watch` should be called for when it becomes readable."""
        own = [] if self._listener is None else [self._listener]
        return [each.fileno() for each in (*own, *list(self._links))]

    def watch(self) -> None:
        """Accept the machine before this one, and report a machine that does not answer."""
        ready = select.poll()
        for descriptor in self.descriptors():
            ready.register(descriptor, select.POLLIN)
        events = dict(ready.poll(0))
        for link, machine in list(self._links.items()):
            is_silent = _silence_s(link) > self.limit_s
            if is_silent or link.fileno() in events:
                del self._links[link]
                is_lost = is_silent or _ended_unheard(link)
                if is_silent:
                    with contextlib.suppress(OSError):
                        link.send(_NOT_HEARD)
                link.close()
                if is_lost:
                    what = f"cannot be reached from machine {self._names[self._own]} for {self.limit_s:g} s"
                    self._report(self._lost(machine, f"{what}: it is lost, or the network between them"))
        if self._listener is not None and self._listener.fileno() in events:
            self._accept()

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            link, _ = self._listener.accept()
            link.settimeout(_CONNECT_S)
            told = link.recv(_TOKEN_BYTES + 1, socket.MSG_WAITALL)
            before = (self._own - 1) % len(self._names)
            if told == self._token + bytes([before % 256]):
                self._add(link, before)

    def _add(self, link: socket.socket, machine: int) -> None:
        link.setblocking(False)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        # `watch` comes before the kernel, which would close the connection without a word to the other machine.
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int((self.limit_s + 2 * _PROBE_S) * 1000))
        self._links[link] = machine


def _ended_unheard(link: socket.socket) -> bool:
    """Return whether a connection ended because one of the two machines does not hear the other."""
    if link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _SILENT:
        return True
    with contextlib.suppress(OSError):
        return link.recv(1) == _NOT_HEARD
    return False


def _silence_s(link: socket.socket) -> float:
    """Return how long the other kernel has not answered, also while this machine's cable is cut."""
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK + 4)
    return struct.unpack_from("I", info, _LAST_ACK)[0] / 1000
