"""Operations that this rank issued on each process group; ranks compare them to find who skipped one.

There are two sources in torch. The sequence number of a group takes a quarter of a microsecond to read; gloo's counts
point-to-point operations too. The flight recorders (`flight_record.py`) hold the latest operations with names and
shapes. A group with several backends has a record for each.

Only groups are compared whose operations all come from the thread that trains: other threads, such as that of an
asynchronous save, issue theirs when their disk or their user lets them, on each rank at another time.

Collectives that torch's flight recorders hold: gloo's and NCCL's latest 2000, with names, shapes and states.

Reading all of them takes a tenth of a second, so they are read only once something is wrong.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections import Counter
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
    """An operation of this rank on a process group.

    Attributes:
        group: torch's name of the group.
        backend: "gloo" or "nccl".
        number: its number in the group, as `_get_sequence_number_for_group` of the backend counts: gloo counts
            point-to-point operations too, NCCL counts collectives only.
        collectives: number of collectives so far, including this one.
        text: its name and shapes, as in `all_reduce of 4x8 Float`.
        is_complete: whether it has ended, on the device for NCCL.
        is_point_to_point: whether it is a send or a receive.
        created_ns: when it was called, in nanoseconds since the epoch.
        thread: identifier of the thread that called it, as `threading.get_ident` returns; None if torch records none.
    """

    group: str
    backend: str
    number: int
    collectives: int
    text: str
    is_complete: bool
    is_point_to_point: bool
    created_ns: int
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
        from booster.failure.failure_report import ranks_text

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
