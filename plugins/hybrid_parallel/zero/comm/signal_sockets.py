"""Sockets on which the ranks of one machine send each other numbers.

A message through gloo wakes a thread of the receiving process, which interrupts its computation: half a millisecond on
machines without spare cores. These are plain local sockets, read only when a rank waits for a number. The end of a rank
is noticed at once, because its socket is closed.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping

from booster.failure.stack_probe import waits_for_ranks

_MESSAGE = struct.Struct("qq")  # tag, number
_CREDENTIALS = struct.Struct("3i")  # process, user and group
_COURIERS_LOOK_MS = 100  # how often the courier checks whether the script has ended


class SignalSocket:
    """Socket to one other rank.

    Args:
        connection: the connected socket.
        rank: the other rank's number, for error messages.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        connection.setblocking(False)
        self.connection, self.rank = connection, rank
        self.to_send: deque[bytes] = deque()
        self.received: dict[int, deque[int]] = {}

    def flush(self) -> None:
        """Send queued messages until the receiver has no more room for them."""
        while self.to_send:
            try:
                self.connection.send(self.to_send[0])
            except BlockingIOError:
                return
            except ConnectionError:  # it has ended: an error only if this rank waits for it, which `read` reports
                self.to_send.clear()
                return
            self.to_send.popleft()

    def read(self) -> None:
        """Read a message, if there is one.

        Raises:
            ConnectionError: if the other rank has ended and sent nothing more.
        """
        try:
            message = self._receive()
        except BlockingIOError:
            return
        if not message:
            raise ConnectionResetError(f"connection closed by rank {self.rank} in an exchange of ZeRO-1")
        tag, number = _MESSAGE.unpack(message)
        self.received.setdefault(tag, deque()).append(number)

    def _receive(self) -> bytes:
        try:
            return self.connection.recv(_MESSAGE.size)
        except ConnectionResetError:  # reported once, before data the peer sent, if it ended with unread messages
            return self.connection.recv(_MESSAGE.size)


class SignalSockets:
    """Sockets to all other ranks of a group. Numbers with one tag keep their order; sending never waits.

    Args:
        lines: rank of the group -> the socket to it.
        timeout_s: how long to wait for a number.
    """

    def __init__(self, lines: Mapping[int, SignalSocket], timeout_s: float) -> None:
        self._lines, self._timeout_s = dict(lines), timeout_s
        self._lock, self._has_courier = threading.Lock(), False

    def send(self, rank: int, tag: int, number: int) -> None:
        """Send a number. It leaves now, or as soon as the receiver has read some of its queued messages."""
        line = self._lines[rank]
        with self._lock:
            line.to_send.append(_MESSAGE.pack(tag, number))
            line.flush()
            needs_courier = bool(line.to_send) and not self._has_courier
            self._has_courier |= needs_courier
        if needs_courier:
            threading.Thread(target=self._deliver, name="booster-courier").start()

    @waits_for_ranks
    def receive(self, rank: int, tag: int) -> int:
        """Return the next number from `rank` with `tag`.

        Raises:
            TimeoutError: if none arrived in time.
            ConnectionError: if the other rank has ended.
        """
        line, until = self._lines[rank], time.monotonic() + self._timeout_s
        while tag not in line.received:
            self._wait(line, until)
            line.read()
        numbers = line.received[tag]
        if len(numbers) == 1:
            del line.received[tag]
        return numbers.popleft()

    @waits_for_ranks
    def _wait(self, line: SignalSocket, until: float) -> None:
        if not _poll_of([line], select.POLLIN).poll(max(0.0, until - time.monotonic()) * 1000):
            raise TimeoutError(
                f"timed out after {self._timeout_s:g} s of waiting for rank {line.rank} in an exchange of ZeRO-1"
            )

    def _deliver(self) -> None:
        """Send queued messages while the main thread does other work; the interpreter waits for this at its exit."""
        while True:
            with self._lock:
                late = [line for line in self._lines.values() if line.to_send]
                self._has_courier = bool(late)
            if not late:
                return
            _poll_of(late, select.POLLOUT).poll(_COURIERS_LOOK_MS)
            with self._lock:
                for line in late:
                    line.flush()
            if not threading.main_thread().is_alive():  # the other rank may also be at its end, waiting for room here
                self._discard_received()

    def _discard_received(self) -> None:
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # no more data, or the other rank has ended
                while line.connection.recv(_MESSAGE.size):
                    pass


def _poll_of(lines: Iterable[SignalSocket], events: int) -> select.poll:
    poll = select.poll()
    for line in lines:
        poll.register(line.connection, events)
    return poll


class Listener:
    """Socket on which other ranks connect to this one.

    Args:
        token: number that the other ranks must know.
    """

    def __init__(self, token: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(_name(token))
        self._socket.listen(1024)

    def accept(self, count: int, timeout_s: float) -> dict[int, socket.socket]:
        """Accept the connections of `count` ranks that call `connect`, by rank; then stop listening."""
        self._socket.settimeout(timeout_s)
        connections = {}
        while len(connections) < count:
            connection, _ = self._socket.accept()
            if not _is_of_this_user(connection):  # names of abstract sockets are listed in /proc
                connection.close()
                continue
            connection.settimeout(timeout_s)
            _, rank = _MESSAGE.unpack(connection.recv(_MESSAGE.size))
            connections[rank] = connection
        self._socket.close()
        return connections


def connect(token: int, rank: int) -> socket.socket:
    """Connect to the listener with that token, as rank `rank`.

    Raises:
        OSError: if no such listener can be reached from here.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(_name(token))
        if not _is_of_this_user(connection):
            raise PermissionError("another user listens there")
        connection.send(_MESSAGE.pack(0, rank))
    except OSError:
        connection.close()
        raise
    return connection


def _is_of_this_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end runs as this one's user."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return user == os.geteuid()


def _name(token: int) -> str:
    # An abstract socket: it has no file, and its name is gone with the socket.
    return f"\0booster-{token:x}"
