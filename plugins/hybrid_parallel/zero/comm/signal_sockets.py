"""Lines on which the ranks of one machine tell each other numbers.

A message through gloo wakes a thread of the other process, which takes the core from what computes there: half a
millisecond on machines without cores to spare. These are plain local sockets, read when somebody waits for a number;
a rank that died is noticed at once, as its end is closed.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping

from booster.failure.stack_probe import waits_for_ranks

_MESSAGE = struct.Struct("qq")  # tag, number
_COURIERS_LOOK_MS = 100  # at whether the script is over


class SignalSocket:
    """To one other rank.

    Args:
        connection: to the other rank.
        rank: what the other is called in messages.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        connection.setblocking(False)
        self.connection, self.rank = connection, rank
        self.to_send: deque[bytes] = deque()
        self.received: dict[int, deque[int]] = {}

    def flush(self) -> None:
        """Send what there is to send, as far as the other has room for it."""
        while self.to_send:
            try:
                self.connection.send(self.to_send[0])
            except BlockingIOError:
                return
            except ConnectionError:  # it has ended: no fault of the job's if nobody waits for it, else `read` says so
                self.to_send.clear()
                return
            self.to_send.popleft()

    def read(self) -> None:
        """Take a message, if there is one.

        Raises:
            ConnectionError: the other rank ended, and has said nothing more.
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
        except ConnectionResetError:  # told once, before what the other has sent, where it ended with messages unread
            return self.connection.recv(_MESSAGE.size)


class SignalSockets:
    """To all other ranks of a group. Numbers of one tag keep their order; sending never waits.

    Args:
        lines: by rank of the group.
        timeout_s: how long to wait for a number.
    """

    def __init__(self, lines: Mapping[int, SignalSocket], timeout_s: float) -> None:
        self._lines, self._timeout_s = dict(lines), timeout_s
        self._lock, self._has_courier = threading.Lock(), False

    def send(self, rank: int, tag: int, number: int) -> None:
        """Tell a number. It leaves now, or as soon as the other has read some of those that wait for it."""
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
        """The next number of that rank with that tag.

        Raises:
            TimeoutError: none came.
            ConnectionError: the other rank ended.
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
        """Send what there was no room for, whatever the main thread does; a script that is over waits for that."""
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
            if not threading.main_thread().is_alive():  # the other may be at its end too, and wait for room here
                self._discard_received()

    def _discard_received(self) -> None:
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # there is nothing more, or the other has ended
                while line.connection.recv(_MESSAGE.size):
                    pass


def _poll_of(lines: Iterable[SignalSocket], events: int) -> select.poll:
    poll = select.poll()
    for line in lines:
        poll.register(line.connection, events)
    return poll


class Listener:
    """Where other ranks reach this one.

    Args:
        token: what they have to know.
    """

    def __init__(self, token: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(_name(token))
        self._socket.listen(1024)

    def accept(self, count: int, timeout_s: float) -> dict[int, socket.socket]:
        """The connections of `count` ranks that have called `connect`, by their rank; then nobody is listened to."""
        self._socket.settimeout(timeout_s)
        connections = {}
        while len(connections) < count:
            connection, _ = self._socket.accept()
            connection.settimeout(timeout_s)
            _, rank = _MESSAGE.unpack(connection.recv(_MESSAGE.size))
            connections[rank] = connection
        self._socket.close()
        return connections


def connect(token: int, rank: int) -> socket.socket:
    """Reach the listener with that token, as rank `rank`.

    Raises:
        OSError: there is none that can be reached from here.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(_name(token))
        connection.send(_MESSAGE.pack(0, rank))
    except OSError:
        connection.close()
        raise
    return connection


def _name(token: int) -> str:
    # No file: the name is gone with the socket.
    return f"\0booster-{token:x}"
