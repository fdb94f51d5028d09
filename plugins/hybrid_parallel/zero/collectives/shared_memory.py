"""ZeRO collectives between CPUs of one machine, whose ranks read each other's memory.

A rank's memory is one anonymous file (`memfd_create`): it has no name that could collide, no limit of /dev/shm, and
needs no cleanup after a rank was killed, because it is gone with the last process that has it open. Other ranks open it
through /proc and map the parts that they read while they read them.

Small messages go over plain local sockets, read only when a rank waits for a number. A message through gloo wakes a
thread of the receiving process, which interrupts its computation: half a millisecond on machines without spare cores.
The end of a rank is noticed at once, because its socket is closed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from booster.failure.peers import machine
from booster.failure.stack_probe import waits_for_ranks
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.zero.bucket_layout import StateMemory
from plugins.hybrid_parallel.zero.collectives import p2p
from plugins.hybrid_parallel.zero.collectives.backend import AllGatherHandle, ReduceScatterHandle
from plugins.hybrid_parallel.zero.collectives.p2p import Answers, P2PCollectives, SentShard
from shardformer.distributed.collectives import world_timeout
from shardformer.distributed.process_groups import all_gather_json

_PAGE = mmap.ALLOCATIONGRANULARITY
# Address space is reserved in pieces of at least this many bytes; pages are allocated when they are written.
_EXTENT = 2**28
_MOST_KEPT = 8  # windows kept per neighbour


class SharedSegment:
    """This rank's memory that other ranks can read. It starts with a unique number, the token.

    Args:
        file: descriptor of the file that it is in; None for memory alone.
    """

    def __init__(self, file: int | None = None) -> None:
        self.file = os.memfd_create("booster", os.MFD_CLOEXEC) if file is None else file
        weakref.finalize(self, os.close, self.file)
        self._extent: mmap.mmap | None = None
        self._extent_start = self._extent_used = 0
        self._places: dict[int, tuple[mmap.mmap, int, int]] = {}  # address -> its extent, offsets in extent and file
        self.token = secrets.randbits(62)
        self.empty(1, torch.int64).fill_(self.token)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate [count] zeros at the start of a page."""
        size = max(1, -(-count * dtype.itemsize // _PAGE)) * _PAGE
        if self._extent is None or self._extent_used + size > len(self._extent):
            self._grow(max(size, _EXTENT))
        start, self._extent_used = self._extent_used, self._extent_used + size
        tensor = torch.frombuffer(self._extent, dtype=dtype, count=count, offset=start)
        self._places[tensor.data_ptr()] = (self._extent, start, self._extent_start + start)
        return tensor

    def place(self, tensor: Tensor) -> int:
        """Return the offset of a tensor from `empty` in the file, in bytes."""
        return self._places[tensor.data_ptr()][2]

    def release(self, tensor: Tensor) -> None:
        """Give the pages of a tensor from `empty` back to the system; its values are lost."""
        extent, start, _ = self._places.pop(tensor.data_ptr())
        size = -(-tensor.numel() * tensor.element_size() // _PAGE) * _PAGE
        extent.madvise(mmap.MADV_REMOVE, start, size)

    def _grow(self, size: int) -> None:
        self._extent_start += len(self._extent) if self._extent is not None else 0
        os.ftruncate(self.file, max(os.fstat(self.file).st_size, self._extent_start + size))
        self._extent, self._extent_used = mmap.mmap(self.file, size, offset=self._extent_start), 0


class PeerSegment:
    """The memory of another rank of this machine.

    Args:
        file: its file descriptor of the memory.
        token: the first number in the memory.

    Raises:
        OSError: if the memory cannot be opened from here, or belongs to another rank.
    """

    def __init__(self, process: int, file: int, token: int) -> None:
        self._file = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._kept: dict[tuple[int, int, torch.dtype], Tensor] = {}
        if os.fstat(self._file).st_size == 0 or self.map_view(0, 1, torch.int64).item() != token:
            raise FileNotFoundError(f"process {process} has no memory to share")

    def map_view(self, place: int, count: int, dtype: torch.dtype, is_kept: bool = False) -> Tensor:
        """Map [count] values that start at byte `place` of the file, for the lifetime of the tensor.

        Args:
            is_kept: whether to keep the mapping for later calls; mapping a page takes as long as reading it.
        """
        if not is_kept:
            return self._map(place, count, dtype)
        key = (place, count, dtype)
        if key not in self._kept:
            if len(self._kept) == _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = self._map(*key)
        return self._kept[key]

    def _map(self, place: int, count: int, dtype: torch.dtype) -> Tensor:
        start = place // _PAGE * _PAGE
        size = place - start + count * dtype.itemsize
        pages = mmap.mmap(self._file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=start)
        return torch.frombuffer(pages, dtype=dtype, count=count, offset=place - start)


_MESSAGE = struct.Struct("qq")  # tag, number
_CREDENTIALS = struct.Struct("3i")  # process, user and group
_COURIERS_LOOK_MS = 100  # how often the courier checks whether the script has ended


class SignalSocket:
    """Socket to one other rank.

    Args:
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
        """Read a message, if there is one; raises ConnectionError if the other rank has ended and sent nothing more."""
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
    """Sockets to all other ranks of a group. Numbers with one tag keep their order; sending never waits."""

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
    """Connect to the listener with that token, as rank `rank`, or raise OSError."""
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


@dataclass
class LocalPeers:
    """One rank's connections in a group whose ranks are all on one machine."""

    memory: SharedSegment  # this rank's memory, which the other ranks can read
    memories: dict[int, PeerSegment]  # rank of the group -> its memory
    lines: SignalSockets  # sockets to the other ranks


def open_segments(segment: SharedSegment, group: ProcessGroup) -> dict[int, PeerSegment]:
    """Open the other ranks' segments, rank of the group -> its memory; must be called on all of `meet_neighbours`."""
    there = all_gather_json((os.getpid(), segment.file, segment.token), group)
    own = dist.get_rank(group)
    # All wait until all are done: a rank that needs no memory closes its file.
    return raise_on_all_ranks(
        lambda: {rank: PeerSegment(*address) for rank, address in enumerate(there) if rank != own}, group
    )


def meet_neighbours(group: ProcessGroup) -> LocalPeers | None:
    """Connect the ranks of a group if all can read each other's memory; must be called on all of them.

    Returns None, on all ranks, if some cannot: on several machines, in containers that do not see each other's
    processes, or on systems other than Linux.
    """
    memory = listener = None
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            memory = SharedSegment()
            listener = Listener(memory.token)
    here = None if listener is None else (machine(), os.getpid(), memory.file, memory.token)
    there, own = all_gather_json(here, group), dist.get_rank(group)
    if None in there or len({address[0] for address in there}) > 1:
        return None
    memories, connections = {}, {}
    with contextlib.suppress(OSError, ValueError):
        for rank, (_, process, file, token) in enumerate(there):
            if rank == own:
                continue
            memory_there = PeerSegment(process, file, token)
            if rank < own:
                connections[rank] = connect(token, own)
            memories[rank] = memory_there
    if not all(all_gather_json(len(memories) == len(there) - 1, group)):
        return None
    timeout_s = world_timeout().total_seconds()
    connections |= listener.accept(len(there) - 1 - own, timeout_s)
    global_ranks = dist.get_process_group_ranks(group)
    lines = {rank: SignalSocket(connection, global_ranks[rank]) for rank, connection in connections.items()}
    return LocalPeers(memory, memories, SignalSockets(lines, timeout_s))


# Bytes of another rank's memory that are mapped at a time: they count as memory of both processes.
_WINDOW = 2**23


class SharedMemoryCollectives(P2PCollectives):
    """ZeRO collectives between CPUs of one machine: every rank reads what it needs from the others' memory."""

    def __init__(self, group: ProcessGroup, neighbours: LocalPeers) -> None:
        super().__init__(group)
        self.memory, self._neighbours = neighbours.memory, neighbours
        self._of_shards, self._memories_of_shards = self.memory, neighbours.memories
        self._places: dict[int, dict[int, int]] = {}  # address of a shard -> rank -> place of its shard
        self._updated: Answers | None = None

    def keep_shards_in(self, memory: StateMemory) -> None:
        """Allocate shards in a file that the other ranks read, a `FileMemory`; see `ZeroCollectives`."""
        super().keep_shards_in(memory)
        self._of_shards = memory.file
        self._memories_of_shards = open_segments(memory.file, self.group)

    def empty_shard(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a shard, and tell the other ranks its place; see `ZeroCollectives`."""
        shard = super().empty_shard(count, dtype, device)
        self._places[shard.data_ptr()] = self._exchange_numbers(p2p.UPDATED, self._of_shards.place(shard))()
        return shard

    def broadcast_number(self, turn: int, kind: int, number: int) -> Answers:
        """Send a number over the sockets between ranks of one machine; see `P2PCollectives`."""
        lines, tag = self._neighbours.lines, p2p.tag_of(turn, kind)
        for rank in self.others:
            lines.send(rank, tag, number)
        return lambda: {rank: lines.receive(rank, tag) for rank in self.others}

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized memory of shape [count] that the other ranks can read."""
        return self.memory.empty(count, dtype)

    def release(self, tensor: Tensor) -> None:
        """Release memory from `empty` that no rank uses any more."""
        self.memory.release(tensor)

    def read(
        self, rank: int, place: int, row: int, like: Tensor, is_kept: bool = False
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield windows of row `row` of the buffer at `place` in another rank's memory; rows are shaped like `like`."""
        start = place + row * like.numel() * like.element_size()
        return _windows(self._neighbours.memories[rank], start, like, is_kept)

    def reduce_scatter(self, flat: Tensor, shard: Tensor) -> ReduceScatterHandle:
        """Start a sum for which `wait` reads the other ranks' summands; see `ZeroCollectives`."""
        return _ReadShard(self, flat, shard)

    def all_gather(self, flat: Tensor, is_copied: bool = False) -> AllGatherHandle:
        """Start a gather for which `wait` reads the other ranks' shards; see `ZeroCollectives`."""
        return _ReadGather(self, flat, is_copied)

    @property
    def gathers_ahead(self) -> bool:
        """False: `gather_shard` reads when it is waited for, as there is nothing that could run meanwhile."""
        return False

    def gather_shard(self, shard: Tensor, flat: Tensor) -> AllGatherHandle:
        """Return a handle that reads the other ranks' shards in `wait`; see `ZeroCollectives`."""
        return _ReadShards(self, shard, flat)

    def read_shards(self, shard: Tensor, flat: Tensor) -> None:
        """Copy the shards of all ranks to `flat`."""
        rows = flat.view(len(self.others) + 1, -1)
        rows[self.rank].copy_(shard)
        for rank, place in self._places[shard.data_ptr()].items():
            for part, window in _windows(self._memories_of_shards[rank], place, rows[rank], False):
                rows[rank][part].copy_(window)

    def begin_update(self) -> None:
        """Wait until all ranks are here; see `ZeroCollectives`."""
        self.await_update()
        self._exchange_numbers(p2p.READ, 0)()

    def end_update(self) -> None:
        """Tell the other ranks that this rank's shards are complete; see `ZeroCollectives`."""
        self.await_update()  # of the update before
        self._updated = self._exchange_numbers(p2p.UPDATED, 0)

    def await_update(self) -> None:
        """Wait until all ranks have called `end_update`; see `ZeroCollectives`."""
        if self._updated is not None:
            self._updated()
            self._updated = None

    def _exchange_numbers(self, kind: int, number: int) -> Answers:
        return self.broadcast_number(self.next_turn(), kind, number)


class _ReadShard(SentShard):
    """Handle of a reduce-scatter whose summands are read from the memory of the other ranks."""

    def __init__(self, exchange: SharedMemoryCollectives, flat: Tensor, shard: Tensor) -> None:
        super().__init__(exchange, shard, [], {})
        self._own = flat.view(len(exchange.others) + 1, -1)[exchange.rank]
        self._places = exchange.broadcast_number(self._turn, p2p.WRITTEN, exchange.memory.place(flat))

    def wait(self) -> Tensor:
        rank, places = self._exchange.rank, self._places()
        # Windows are kept: gradient buffers reuse the same memory.
        readers = [self._exchange.read(other, place, rank, self.shard, is_kept=True) for other, place in places.items()]
        for windows in zip(*readers, strict=True):
            part, _ = windows[0]
            theirs = {other: window for other, (_, window) in zip(places, windows, strict=True)}
            p2p.add_up({rank: self._own[part], **theirs}, self.shard[part])
        return self.shard


class _ReadGather(AllGatherHandle):
    """Handle of an all-gather that reads shards in place, or from copies that are released after all have read them."""

    def __init__(self, exchange: SharedMemoryCollectives, flat: Tensor, is_copied: bool) -> None:
        super().__init__()
        self._exchange, self._flat, self._turn = exchange, flat, exchange.next_turn()
        self._rows = flat.view(len(exchange.others) + 1, -1)
        self._copy: Tensor | None = None
        if is_copied:
            self._copy = exchange.memory.empty(self._rows.shape[1], flat.dtype)
            self._copy.copy_(self._rows[exchange.rank])
        told = flat if self._copy is None else self._copy
        self._places = exchange.broadcast_number(self._turn, p2p.UPDATED, exchange.memory.place(told))
        self._answers: Answers | None = None

    def wait(self) -> None:
        if self._answers is not None:
            return
        for rank, place in self._places().items():
            row = rank if self._copy is None else 0
            for part, window in self._exchange.read(rank, place, row, self._rows[rank]):
                self._rows[rank][part].copy_(window)
        self._answers = self._exchange.broadcast_number(self._turn, p2p.READ, 0)

    def close(self) -> None:
        self.wait()
        self._answers()
        if self._copy is not None:
            self._exchange.memory.release(self._copy)
            self._copy = None


class _ReadShards(AllGatherHandle):
    """Handle of a gather that reads when it is waited for."""

    def __init__(self, exchange: SharedMemoryCollectives, shard: Tensor, flat: Tensor) -> None:
        super().__init__()
        self._exchange, self._shard, self._flat = exchange, shard, flat

    def wait(self) -> None:
        self._exchange.read_shards(self._shard, self._flat)


def _windows(memory: PeerSegment, start: int, like: Tensor, is_kept: bool) -> Iterator[tuple[slice, Tensor]]:
    """Yield windows of the values at `start` of another rank's memory, as many as `like` has."""
    count, step = like.numel(), _WINDOW // like.element_size()
    for first in range(0, count, step):
        part = slice(first, min(first + step, count))
        address = start + first * like.element_size()
        yield part, memory.map_view(address, part.stop - first, like.dtype, is_kept and count <= step)
