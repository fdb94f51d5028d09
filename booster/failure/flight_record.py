"""Collectives that torch's flight recorders hold: gloo's and NCCL's latest 2000, with names, shapes and states.

Reading all of them takes a tenth of a second, so they are read only once something is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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
