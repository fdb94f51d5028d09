"""Operations of this rank: the calls of its main thread, and the collectives that it has issued on each process group.

Other threads read the calls, and the other ranks of this machine. A call costs a microsecond: it writes a few bytes to
a memory page that these ranks have mapped, and can still read after this process has ended.

Ranks compare collectives to find who skipped one. The sequence number of a group takes a quarter of a microsecond to
read; gloo's counts point-to-point operations too. torch's flight recorders hold the latest 2000 operations with names,
shapes and states. Reading them takes a tenth of a second, so they are read only once something is wrong.

Only groups are compared whose operations all come from the thread that trains: other threads, such as that of an
asynchronous save, issue theirs when their disk or their user lets them, on each rank at another time.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True)
class RecordedOperation:
    """An operation of this rank on a process group."""

    group: str  # torch's name of the group
    backend: str  # "gloo" or "nccl"
    # its number in the group, as `_get_sequence_number_for_group` of the backend counts: gloo counts point-to-point
    # operations too, NCCL counts collectives only
    number: int
    collectives: int  # number of collectives so far, including this one
    text: str  # its name and shapes, as in `all_reduce of 4x8 Float`
    is_complete: bool  # whether it has ended, on the device for NCCL
    is_point_to_point: bool
    created_ns: int  # when it was called, in nanoseconds since the epoch
    # identifier of the thread that called it, as `threading.get_ident` returns; None if torch records none
    thread: int | None = None


def recorded_operations() -> list[RecordedOperation]:
    """Return the recorded operations of both backends, oldest first."""
    found = _read("_dump_fr_trace_json", "gloo") + _read("_dump_nccl_trace_json", "nccl")
    return sorted(found, key=lambda each: each.created_ns)


def outstanding_on_device() -> tuple[RecordedOperation, ...]:
    """Return the NCCL operations that are launched and not complete, oldest first."""
    return tuple(each for each in _read("_dump_nccl_trace_json", "nccl", only_active=True) if not each.is_complete)


def _read(name: str, backend: str, only_active: bool = False) -> list[RecordedOperation]:
    dump: Callable[[bool, bool], bytes] | None = getattr(torch._C._distributed_c10d, name, None)
    if dump is None:  # this torch has no such recorder
        return []
    entries = json.loads(dump(True, only_active)).get("entries", [])
    return [
        _operation(entry, backend)
        for entry in entries
        if entry.get("profiling_name", "").startswith(f"{backend}:") and "op_id" in entry
    ]


def _operation(entry: dict[str, Any], backend: str) -> RecordedOperation:
    is_nccl = backend == "nccl"
    name = entry["profiling_name"]
    return RecordedOperation(
        group=entry["process_group"][0],
        backend=backend,
        number=entry["collective_seq_id"] if is_nccl else entry["op_id"],
        collectives=entry["collective_seq_id"],
        text=_described(entry, name.removeprefix(f"{backend}:")),
        is_complete=entry["retired"] or (is_nccl and entry.get("state") == "completed"),
        is_point_to_point=entry.get("is_p2p", False) or any(word in name for word in _POINT_TO_POINT),
        created_ns=entry.get("time_created_ns", 0),
        thread=int(entry["thread_id"]) if entry.get("thread_id", "").isdecimal() else None,
    )


def _described(entry: dict[str, Any], name: str) -> str:
    shapes = ["x".join(map(str, size)) or "one" for size in entry["input_sizes"]]
    kinds = entry["input_dtypes"][:1]
    return f"{name} of {' and '.join(shapes[:2])} {''.join(kinds)}" if shapes else name


_KEPT_OPERATIONS = 200
_UNNAMED = ("", "undefined")
_OF_TRAINING = "mesh_"  # begins the descriptions of the groups that only training uses


@dataclass
class GroupRecord:
    """Operations that a rank has issued on one group."""

    name: str  # name of the group; empty if it has none
    ranks: list[int]  # members of the group
    issued: int  # number of operations
    role: str = ""  # equal for corresponding groups on other ranks, such as the groups of one mesh axis
    only_collectives: bool = False  # whether this number counts only collectives, which are the same on all members
    # (sequence number, name and shapes) of the latest collectives
    operations: list[tuple[int, str]] = field(default_factory=list)
    is_comparable: bool = False  # whether the training thread alone is known to issue its operations
    pending: int | None = None  # sequence number of the oldest incomplete collective; None if all are complete
    message: str = ""  # the oldest incomplete point-to-point operation of NCCL; empty if there is none

    def add(self, operations: list[RecordedOperation]) -> None:
        """Add the recorded operations of this group on one backend, oldest first."""
        # NCCL numbers collectives and messages apart: only collectives have an order that all members share.
        apart = [each for each in operations if each.is_point_to_point and each.backend == "nccl"]
        self.message = next((each.text for each in apart if not each.is_complete), "")
        numbered = [each for each in operations if each not in apart] if apart else operations
        if not numbered:
            return
        self.only_collectives = numbered[-1].number == numbered[-1].collectives == self.issued
        self.operations = [(each.number, each.text) for each in numbered[-_KEPT_OPERATIONS:]]
        self.pending = next((each.number for each in numbered if not each.is_complete), None)

    @property
    def waits_behind(self) -> str:
        """The oldest incomplete operation, for messages; empty if there is none."""
        found = dict(self.operations).get(self.pending, self.message)
        return f"{found} on {self.text()}" if found else ""

    def text(self) -> str:
        """Describe the group, for messages."""
        from booster.failure.diagnosis import ranks_text

        members = f"the group of {ranks_text(self.ranks)}"
        return f"{members} ({self.name})" if self.name else members


class CollectiveCounts:
    """Reads how many operations this rank has issued on each process group of more than one rank, and which."""

    def __init__(self) -> None:
        self._counters: WeakKeyDictionary[ProcessGroup, list[_Counter]] = WeakKeyDictionary()

    def issued(self) -> dict[str, int]:
        """Return group -> number of operations that this rank issued."""
        numbers = ((each.key, each.number(group)) for group in _groups() for each in self._counters_of(group))
        return {key: number for key, number in numbers if number is not None}

    def records(self, with_operations: bool = True) -> dict[str, GroupRecord]:
        """Return group -> record from the sequence numbers and, if `with_operations`, the flight recorder."""
        operations: dict[tuple[str, str], list[RecordedOperation]] = {}
        recorded = recorded_operations() if with_operations else []
        for each in recorded:
            operations.setdefault((each.group, each.backend), []).append(each)
        threads = _training_threads(recorded)
        found: dict[str, GroupRecord] = {}
        made_alike: Counter[int] = Counter()
        for group in _groups():
            ranks = dist.get_process_group_ranks(group)
            pattern = _pattern(ranks)
            made_alike[pattern] += 1
            for each in self._counters_of(group):
                role = f"{pattern:08x}/{made_alike[pattern]}/{each.backend}"
                own = operations.get((group.group_name, each.backend), [])
                is_trainings = _is_trainings(group)  # for a torch that records no threads
                comparable = all(is_trainings if one.thread is None else one.thread in threads for one in own)
                record = GroupRecord(_name(group), ranks, each.number(group) or 0, role, is_comparable=comparable)
                record.add(own)
                found[each.key] = record
        return found

    def left_out_since(self, before: Mapping[str, int], since: Mapping[str, int]) -> int | None:
        """Return how many leading collectives of the previous step this rank has skipped in the current one.

        Args:
            before, since: results of `issued` at the start and at the end of the previous step.

        Returns:
            The number; None if the current step does not continue like the previous one after these collectives.
        """
        keys = {(group.group_name, each.backend): each.key for group in _groups() for each in self._counters_of(group)}
        earlier, now = [], []
        recorded = recorded_operations()
        threads = _training_threads(recorded)
        for each in recorded:
            key = keys.get((each.group, each.backend))
            if key is None or each.is_point_to_point or (each.thread is not None and each.thread not in threads):
                continue
            if each.number > since.get(key, 0):
                now.append((key, each.text))
            elif each.number > before.get(key, 0):
                earlier.append((key, each.text))
        return next((left for left in range(len(earlier)) if earlier[left : left + len(now)] == now), None)

    def _counters_of(self, group: ProcessGroup) -> list[_Counter]:
        if group not in self._counters:
            self._counters[group] = _Counter.of(group)
        return self._counters[group]


@dataclass(frozen=True)
class _Counter:
    """Counter of the operations of a group on one backend."""

    key: str  # the same on all members of the group
    backend: str  # name of the backend
    device: str = ""  # device type whose tensors it takes; empty if the group has no other backend

    @staticmethod
    def of(group: ProcessGroup) -> list[_Counter]:
        """Return the counters of a group, one for each of its backends."""
        members = zlib.crc32(json.dumps(dist.get_process_group_ranks(group)).encode())
        key = f"{group.group_name}/{members:08x}"
        pairs = [each.partition(":") for each in dist.get_backend_config(group).split(",")]  # "cpu:gloo,cuda:nccl"
        devices = {backend: device for device, _, backend in pairs}
        if len(devices) == 1:
            return [_Counter(key, backend) for backend in devices]
        return [_Counter(f"{key}/{backend}", backend, device) for backend, device in devices.items()]

    def number(self, group: ProcessGroup) -> int | None:
        """Return the sequence number of the latest operation; None for a backend that does not count."""
        try:
            counted = group._get_backend(torch.device(self.device)) if self.device else group
            return counted._get_sequence_number_for_group()
        except RuntimeError:
            return None


def _training_threads(operations: list[RecordedOperation]) -> frozenset[int]:
    """Return the threads that train: the main one, and those in which autograd runs backward passes on GPUs."""
    mesh = {group.group_name for group in _groups() if _is_trainings(group)}
    on_device = {each.thread for each in operations if each.backend == "nccl" and each.group in mesh}
    return frozenset({threading.main_thread().ident, *on_device} - {None})


def _groups() -> list[ProcessGroup]:
    """Return the groups of more than one rank."""
    return [group for group in list(dist.distributed_c10d._world.pg_map) if group.size() > 1]


def _pattern(ranks: list[int]) -> int:
    """Hash the spacing of the ranks: the value is the same for ranks 0 and 2 as for 1 and 3."""
    return zlib.crc32(json.dumps([rank - ranks[0] for rank in ranks]).encode())


def _is_trainings(group: ProcessGroup) -> bool:
    return group.group_desc.startswith(_OF_TRAINING)


def _name(group: ProcessGroup) -> str:
    description = group.group_desc
    return "" if description in _UNNAMED else description.removeprefix(_OF_TRAINING)


_ENDED, _SPOKEN, _CODE, _TOLD = 0, 1, 2, 3  # bytes of the page: flags, and the exit code
_SIZE = mmap.PAGESIZE
_KEPT_POINTS = 4096


class PageText:
    """Attribute of a page that is text, cut to its room there."""

    def __init__(self, start: int, stop: int) -> None:
        self.where, self.room = slice(start, stop), stop - start

    def __get__(self, page: SharedStatus, owner: type | None = None) -> str:
        return page.memory[self.where].partition(b"\0")[0].decode(errors="replace")

    def __set__(self, page: SharedStatus, text: str) -> None:
        page.memory[self.where] = text.encode()[: self.room - 1].ljust(self.room, b"\0")


class SharedStatus:
    """Memory page that a rank shares with the others of its machine; freed when the last process ends.

    Args:
        path: path of another rank's page under /proc; None to create this rank's own page.

    Attributes:
        phrase: current operation, such as `in booster.execute_pipeline (call 3)`.
        place: where the main thread has been blocked; empty if it is not.
        batch: that of the current pass through a model, as `Operations.begin_batch` writes it; empty before the first.
    """

    phrase, place, batch = PageText(64, 512), PageText(512, 1024), PageText(1024, 3072)

    def __init__(self, path: str | None = None) -> None:
        self.descriptor = os.memfd_create("booster") if path is None else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if path is None:
            os.ftruncate(self.descriptor, _SIZE)
        self.memory = mmap.mmap(self.descriptor, _SIZE)

    @property
    def ended(self) -> bool:
        """Whether the rank's script has ended."""
        return self.memory[_ENDED] == 1

    @property
    def exit_code(self) -> int:
        """Exit code that the rank's script passed to `sys.exit` at its end, else 0."""
        return self.memory[_CODE]

    def set_ended(self, exit_code: int = 0) -> None:
        """Record that the rank's script has ended, with the lowest 8 bits of its exit code."""
        self.memory[_CODE] = exit_code & 0xFF
        self.memory[_ENDED] = 1

    @property
    def got_sigterm(self) -> bool:
        """Whether the rank got SIGTERM, as all ranks of a job do that is to end."""
        return self.memory[_TOLD] == 1

    def set_got_sigterm(self) -> None:
        """Record that the rank got SIGTERM."""
        self.memory[_TOLD] = 1

    def claim_report(self) -> bool:
        """Return True to the first process that calls this: only that process prints the failure."""
        try:
            os.lockf(self.descriptor, os.F_LOCK, 0)
            first = self.memory[_SPOKEN] == 0
            self.memory[_SPOKEN] = 1
            os.lockf(self.descriptor, os.F_ULOCK, 0)
        except OSError:
            return True
        return first


class Operations:
    """Log of the operations that the main thread has called and is in.

    Attributes:
        calls, completed: how often each operation was started, and completed without an error.
        counts: reads the numbers of collectives that this rank has issued.
        points: (call number, counts at its end) of the latest `optimizer.step` calls.
    """

    def __init__(self) -> None:
        self.page = SharedStatus() if hasattr(os, "memfd_create") else None
        self.calls: dict[str, int] = {}
        self.completed: dict[str, int] = {}
        self.counts = CollectiveCounts()
        self.points: deque[tuple[int, dict[str, int]]] = deque(maxlen=_KEPT_POINTS)
        self._inside: list[str] = []
        self._passes = 0
        self._say("before its first operation")

    @property
    def current(self) -> tuple[str, int]:
        """Innermost operation and its call number; ("", 0) outside of any operation."""
        inside = self._inside[-1:]
        return (inside[0], self.calls[inside[0]]) if inside else ("", 0)

    def enter(self, operation: str) -> None:
        """Record that the main thread starts an operation; ignored in other threads."""
        if threading.current_thread() is not threading.main_thread():
            return
        number = self.calls[operation] = self.calls.get(operation, 0) + 1
        self._inside.append(operation)
        self._say(f"in {operation} (call {number})")

    def leave(self, operation: str, well: bool, count: Callable[[], dict[str, int]] | None = None) -> None:
        """Record that the main thread ends an operation; ignored in other threads.

        Args:
            well: whether it completed without an error.
            count: returns the counts to record in `points`, for an operation after which they agree on all ranks.
        """
        if threading.current_thread() is not threading.main_thread() or not self._inside:
            return
        self._inside.pop()
        if well:
            self.completed[operation] = self.completed.get(operation, 0) + 1
            if count is not None:
                self.points.append((self.calls[operation], count()))
        outer, number = self.current
        self._say(f"in {outer} (call {number})" if outer else f"after {operation} (call {self.calls[operation]})")

    def begin_batch(self, replica: int, shapes: dict[str, list[int]]) -> None:
        """Record that a pass through a model begins, with the replica's number and the shapes of its batch."""
        if self.page is not None and threading.current_thread() is threading.main_thread():
            self._passes += 1
            self.page.batch = json.dumps([self._passes, replica, shapes])

    def _say(self, phrase: str) -> None:
        self.phrase = phrase
        if self.page is not None:
            self.page.phrase = phrase
