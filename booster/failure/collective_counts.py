"""How many operations this rank issued on each process group, and which: ranks compare that to find who skipped one.

Two sources of torch. The sequence number of a group costs a quarter of a microsecond to read; it counts
point-to-point operations too. The flight recorder holds the last 2000 collectives of gloo with names and shapes;
reading it takes a tenth of a second, so that it is asked only once something is wrong.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_KEPT_OPERATIONS = 200
_UNNAMED = ("", "undefined")
_POINT_TO_POINT = ("send", "recv")


@dataclass
class GroupRecord:
    """What a rank has done on one group.

    Attributes:
        name: what the group is called, empty where nobody named it.
        ranks: its members.
        issued: number of operations.
        only_collectives: whether that number counts nothing but collectives, which are alike on all members.
        operations: (number, name and shapes) of the latest collectives.
        role: the same for groups that were made alike on other ranks, as the groups of one mesh axis are.
        pending: number of the oldest collective that is not complete; None where all are.
    """

    name: str
    ranks: list[int]
    issued: int
    role: str = ""
    only_collectives: bool = False
    operations: list[tuple[int, str]] = field(default_factory=list)
    pending: int | None = None

    def text(self) -> str:
        """For messages."""
        from booster.failure.failure_report import ranks_text

        members = f"the group of {ranks_text(self.ranks)}"
        return f"{members} ({self.name})" if self.name else members


def issued() -> dict[str, int]:
    """Group -> number of operations issued on it by this rank, for the groups that have others in them."""
    numbers = ((key, _number(group)) for key, group in _groups())
    return {key: number for key, number in numbers if number is not None}


def records(with_operations: bool = True) -> dict[str, GroupRecord]:
    """Group -> what the sequence numbers and, if asked, the flight recorder say of it."""
    entries: dict[str, list[dict[str, Any]]] = {}
    for entry in _flight_record() if with_operations else ():
        entries.setdefault(entry["process_group"][0], []).append(entry)
    found: dict[str, GroupRecord] = {}
    made_alike: Counter[int] = Counter()
    for key, group in _groups():
        mine = entries.get(group.group_name, [])
        ranks = dist.get_process_group_ranks(group)
        pattern = _pattern(ranks)
        made_alike[pattern] += 1
        role = f"{pattern:08x}/{made_alike[pattern]}"
        record = GroupRecord(_name(group), ranks, _number(group) or 0, role)
        if mine:
            record.only_collectives = mine[-1]["op_id"] == mine[-1]["collective_seq_id"] == record.issued
            record.operations = [(entry["op_id"], _described(entry)) for entry in mine[-_KEPT_OPERATIONS:]]
            pending = [entry["op_id"] for entry in mine if not entry["retired"]]
            record.pending = pending[0] if pending else None
        found[key] = record
    return found


def left_out_since(before: Mapping[str, int], since: Mapping[str, int]) -> int | None:
    """How many of the first collectives of the step before this rank has left out in this one, which goes on like it.

    Args:
        before, since: what was `issued` when that step began and when it ended.

    Returns:
        None if this step is unlike it otherwise too.
    """
    keys = {group.group_name: key for key, group in _groups()}
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


def _pattern(ranks: list[int]) -> int:
    """The same for ranks 0 and 2 as for 1 and 3."""
    return zlib.crc32(json.dumps([rank - ranks[0] for rank in ranks]).encode())


def _number(group: ProcessGroup) -> int | None:
    """Of the group's latest operation; None for a backend that does not count."""
    try:
        return group._get_sequence_number_for_group()
    except RuntimeError:
        return None


def _groups() -> Iterator[tuple[str, ProcessGroup]]:
    """A name that is the same on all members -> group."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.size() > 1:
            yield _key(group), group


_KEYS: dict[ProcessGroup, str] = {}


def _key(group: ProcessGroup) -> str:
    if group not in _KEYS:
        members = zlib.crc32(json.dumps(dist.get_process_group_ranks(group)).encode())
        _KEYS[group] = f"{group.group_name}/{members:08x}"
    return _KEYS[group]


def _name(group: ProcessGroup) -> str:
    description = group.group_desc
    return "" if description in _UNNAMED else description.removeprefix("mesh_")


def _flight_record() -> list[dict[str, Any]]:
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:  # a torch without the recorder
        return []
    entries = json.loads(dump(True, False)).get("entries", [])
    return [entry for entry in entries if entry.get("profiling_name", "").startswith("gloo:") and "op_id" in entry]


def _described(entry: dict[str, Any]) -> str:
    """`all_reduce of 4x8 Float`."""
    name = entry["profiling_name"].removeprefix("gloo:")
    shapes = ["x".join(map(str, size)) or "one" for size in entry["input_sizes"]]
    kinds = entry["input_dtypes"][:1]
    return f"{name} of {' and '.join(shapes[:2])} {''.join(kinds)}" if shapes else name
