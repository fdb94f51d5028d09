"""Operations that this rank issued on each process group; ranks compare them to find who skipped one.

There are two sources in torch. The sequence number of a group takes a quarter of a microsecond to read; it counts
point-to-point operations too. The flight recorder holds the last 2000 gloo collectives with names and shapes; reading
it takes a tenth of a second, so it is read only once something is wrong.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_KEPT_OPERATIONS = 200
_UNNAMED = ("", "undefined")
_POINT_TO_POINT = ("send", "recv")


@dataclass
class GroupRecord:
    """Operations that a rank has issued on one group.

    Attributes:
        name: name of the group; empty if it has none.
        ranks: members of the group.
        issued: number of operations.
        only_collectives: whether this number counts only collectives, which are the same on all members.
        operations: (sequence number, name and shapes) of the latest collectives.
        role: equal for corresponding groups on other ranks, such as the groups of one mesh axis.
        pending: sequence number of the oldest incomplete collective; None if all are complete.
    """

    name: str
    ranks: list[int]
    issued: int
    role: str = ""
    only_collectives: bool = False
    operations: list[tuple[int, str]] = field(default_factory=list)
    pending: int | None = None

    def add(self, entries: list[dict[str, Any]]) -> None:
        """Add the flight recorder's entries of this group, oldest first."""
        if not entries:
            return
        self.only_collectives = entries[-1]["op_id"] == entries[-1]["collective_seq_id"] == self.issued
        self.operations = [(entry["op_id"], _described(entry)) for entry in entries[-_KEPT_OPERATIONS:]]
        self.pending = next((entry["op_id"] for entry in entries if not entry["retired"]), None)

    def text(self) -> str:
        """Describe the group, for messages."""
        from booster.failure.failure_report import ranks_text

        members = f"the group of {ranks_text(self.ranks)}"
        return f"{members} ({self.name})" if self.name else members


class CollectiveCounts:
    """Reads how many operations this rank has issued on each process group of more than one rank, and which."""

    def __init__(self) -> None:
        self._keys: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()

    def issued(self) -> dict[str, int]:
        """Return group -> number of operations that this rank issued."""
        numbers = ((key, _number(group)) for key, group in self._groups())
        return {key: number for key, number in numbers if number is not None}

    def records(self, with_operations: bool = True) -> dict[str, GroupRecord]:
        """Return group -> record from the sequence numbers and, if `with_operations`, the flight recorder."""
        entries: dict[str, list[dict[str, Any]]] = {}
        for entry in _flight_record() if with_operations else ():
            entries.setdefault(entry["process_group"][0], []).append(entry)
        found: dict[str, GroupRecord] = {}
        made_alike: Counter[int] = Counter()
        for key, group in self._groups():
            ranks = dist.get_process_group_ranks(group)
            pattern = _pattern(ranks)
            made_alike[pattern] += 1
            record = GroupRecord(_name(group), ranks, _number(group) or 0, f"{pattern:08x}/{made_alike[pattern]}")
            record.add(entries.get(group.group_name, []))
            found[key] = record
        return found

    def left_out_since(self, before: Mapping[str, int], since: Mapping[str, int]) -> int | None:
        """Return how many leading collectives of the previous step this rank has skipped in the current one.

        Args:
            before, since: results of `issued` at the start and at the end of the previous step.

        Returns:
            The number; None if the current step does not continue like the previous one after these collectives.
        """
        keys = {group.group_name: key for key, group in self._groups()}
        earlier, now = [], []
        for entry in _flight_record():
            key, number = keys.get(entry["process_group"][0]), entry["op_id"]
            if key is None or any(word in entry["profiling_name"] for word in _POINT_TO_POINT):
                continue
            if number > since.get(key, 0):
                now.append((key, _described(entry)))
            elif number > before.get(key, 0):
                earlier.append((key, _described(entry)))
        return next((left for left in range(len(earlier)) if earlier[left : left + len(now)] == now), None)

    def _groups(self) -> Iterator[tuple[str, ProcessGroup]]:
        """Yield (key, group) for each group of more than one rank; the key is the same on all members."""
        for group in list(dist.distributed_c10d._world.pg_map):
            if group.size() > 1:
                yield self._key(group), group

    def _key(self, group: ProcessGroup) -> str:
        if group not in self._keys:
            members = zlib.crc32(json.dumps(dist.get_process_group_ranks(group)).encode())
            self._keys[group] = f"{group.group_name}/{members:08x}"
        return self._keys[group]


def _pattern(ranks: list[int]) -> int:
    """Hash the spacing of the ranks: the value is the same for ranks 0 and 2 as for 1 and 3."""
    return zlib.crc32(json.dumps([rank - ranks[0] for rank in ranks]).encode())


def _number(group: ProcessGroup) -> int | None:
    """Return the sequence number of the group's latest operation; None for a backend that does not count."""
    try:
        return group._get_sequence_number_for_group()
    except RuntimeError:
        return None


def _name(group: ProcessGroup) -> str:
    description = group.group_desc
    return "" if description in _UNNAMED else description.removeprefix("mesh_")


def _flight_record() -> list[dict[str, Any]]:
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:  # this torch has no flight recorder
        return []
    entries = json.loads(dump(True, False)).get("entries", [])
    return [entry for entry in entries if entry.get("profiling_name", "").startswith("gloo:") and "op_id" in entry]


def _described(entry: dict[str, Any]) -> str:
    """Describe a collective, as in `all_reduce of 4x8 Float`."""
    name = entry["profiling_name"].removeprefix("gloo:")
    shapes = ["x".join(map(str, size)) or "one" for size in entry["input_sizes"]]
    kinds = entry["input_dtypes"][:1]
    return f"{name} of {' and '.join(shapes[:2])} {''.join(kinds)}" if shapes else name
