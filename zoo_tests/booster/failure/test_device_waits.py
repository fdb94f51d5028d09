"""Ranks that wait for NCCL, from dumps in the format of torch's flight recorder: no GPU has produced them.

The format is that of `FlightRecorder::dump_json` in torch 2.11 to 2.13.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from booster.failure import desync, stack_probe
from booster.failure.desync import DesyncDetector, _may_be_reported
from booster.failure.diagnosis import diagnose_standstill
from booster.failure.operation_log import CollectiveCounts, Operations, outstanding_on_device, recorded_operations
from booster.failure.stack_probe import MainThreadProbe, Wait, wait_of
from plugins.hybrid_parallel.shard_report import fake_rank

NAMES = ("all_reduce", "_all_gather_base", "all_reduce")


def entry(number: int, name: str, state: str, group: str = "0", **changes: Any) -> dict[str, Any]:
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": [group, "default_pg"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 1000 + number,
        "input_sizes": [[4, 8]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4, 8]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 0,
        "retired": False,
        "timeout_ms": 600000,
        "is_p2p": False,
        **changes,
    }


def replace_dump(monkeypatch: pytest.MonkeyPatch, entries: list[dict[str, Any]]) -> None:
    """Give this process NCCL's recorder with these entries; what is added to the list is in the next dump."""

    def dump(with_collectives: bool, only_active: bool) -> bytes:
        shown = [each for each in entries if not only_active or each["state"] != "completed"]
        return json.dumps({"version": "2.10", "pg_status": {}, **({"entries": shown} if shown else {})}).encode()

    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)


def recorded(*states: str) -> list[dict[str, Any]]:
    """A rank's all_reduce, all_gather and all_reduce, as many as there are states."""
    return [entry(number, NAMES[number - 1], state) for number, state in enumerate(states, start=1)]


def test_a_dump_is_read_like_gloos(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        *recorded("completed", "scheduled"),
        entry(2, "recv 0<-1", "started", is_p2p=True, op_id=7),
        entry(1, "gloo:all_reduce", "scheduled", profiling_name="gloo:all_reduce"),
    ]
    replace_dump(monkeypatch, entries)
    found = [each for each in recorded_operations() if each.backend == "nccl"]
    assert [(each.number, each.text, each.is_complete, each.is_point_to_point) for each in found] == [
        (1, "all_reduce of 4x8 Float", True, False),
        (2, "_all_gather_base of 4x8 Float", False, False),
        (2, "recv 0<-1 of 4x8 Float", False, True),
    ]
    assert list(outstanding_on_device()) == found[1:]


def test_a_torch_without_nccl_has_nothing_outstanding() -> None:
    assert hasattr(torch._C._distributed_c10d, "_dump_nccl_trace_json") == dist.is_nccl_available()
    assert outstanding_on_device() == ()


class _Group:
    """Number of operations of each backend; stands for `ProcessGroup._get_backend(device)`."""

    def __init__(self, **numbers: int) -> None:
        self.numbers = numbers

    def of(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(_get_sequence_number_for_group=lambda: self.numbers[device.type])


def records_of(monkeypatch: pytest.MonkeyPatch, issued: int, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """What a rank of a group of `cpu:gloo,cuda:nccl` reports."""
    replace_dump(monkeypatch, entries)
    with fake_rank(0, 2), monkeypatch.context() as patch:
        world = dist.group.WORLD
        patch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        patch.setattr(type(world), "_get_backend", lambda group, device: _Group(cpu=0, cuda=issued).of(device))
        patch.setattr(type(world), "group_name", "0")
        counts = CollectiveCounts()
        assert sorted(number for number in counts.issued().values()) == [0, issued]
        return counts.records()


def test_both_backends_of_a_group_have_records(monkeypatch: pytest.MonkeyPatch) -> None:
    found = records_of(monkeypatch, 2, recorded("completed", "scheduled"))
    gloo, nccl = found.values()
    assert [key.rpartition("/")[2] for key in found] == ["gloo", "nccl"]
    assert (gloo.operations, gloo.pending) == ([], None)
    assert (nccl.issued, nccl.pending, nccl.only_collectives) == (2, 2, True)
    assert nccl.waits_behind == "_all_gather_base of 4x8 Float on the group of ranks 0 and 1 (default_pg)"
    messages = [entry(2, "recv 0<-1", "scheduled", is_p2p=True)]
    assert [*records_of(monkeypatch, 0, messages).values()][1].waits_behind.startswith("recv 0<-1 of 4x8 Float on")


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The main thread is blocked in one `.item()`; yields the entries of NCCL's recorder."""
    entries = recorded("completed", "scheduled")
    replace_dump(monkeypatch, entries)
    monkeypatch.setattr(stack_probe, "_instruction", lambda: (1, 1))
    monkeypatch.setattr(stack_probe, "wait_of", lambda frame: Wait("item", "optimizer.py:9", on_device=True))
    yield entries


def test_a_wait_for_the_gpu_counts_as_long_as_nccl_makes_no_progress(
    waiting: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host spins, so that its processor time says nothing."""
    clock = [100.0]
    monkeypatch.setattr(stack_probe.time, "monotonic", lambda: clock[0])
    probe = MainThreadProbe()
    blocked = []

    def look() -> float:
        clock[0] += 0.5
        probe.look()
        return probe.blocked_s

    blocked = [look() for _ in range(16)]
    assert blocked == [0.0, 0.0, *(0.5 * looks for looks in range(1, 15))]
    assert probe.wait.text() == "waiting for its GPU in item at optimizer.py:9"
    waiting.append(entry(3, "all_reduce", "scheduled"))
    assert look() == 0.0, "the device went on"
    for each in waiting:
        each["state"] = "completed"
    look()
    assert probe.wait is None, "the device computes, and waits for nobody"


def test_a_host_that_waits_for_its_gpu_is_seen_on_its_stack() -> None:
    lock = threading.Lock()
    lock.acquire()
    tensor = SimpleNamespace(item=lock.acquire, tolist=lock.acquire, cpu=lock.acquire)
    event = SimpleNamespace(synchronize=lock.acquire)
    calls: dict[str, Callable[[], Any]] = {
        "item": lambda: tensor.item(),
        "tolist": lambda: tensor.tolist(),
        "cpu": lambda: tensor.cpu(),
        "synchronize": lambda: event.synchronize(),
    }
    for name, call in calls.items():
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        time.sleep(0.05)
        found = wait_of(sys._current_frames()[thread.ident])
        assert (found.call, found.on_device) == (name, True)
        assert "failure/test_device_waits.py:" in found.place
        lock.release()
        thread.join()
        lock.acquire(blocking=False)


def snapshot_of(monkeypatch: pytest.MonkeyPatch, rank: int, issued: int, entries: list[dict[str, Any]]) -> Any:
    """What a rank answers that waits for its GPU in `.item()` of its third step."""
    records = records_of(monkeypatch, issued, entries)
    operations, main = Operations(), MainThreadProbe()
    operations.calls["optimizer.step"] = 2
    operations.enter("optimizer.step")
    main.wait = Wait("item", "optimizer.py:9", on_device=True)
    main._outstanding_since = time.monotonic() - 7.0
    monkeypatch.setattr(operations.counts, "records", lambda: records)
    detector = DesyncDetector(rank, 2, operations, main, True, lambda failure: None)
    assert detector._standstill_limit() == desync._STANDSTILL_ON_DEVICE_S < 7.0
    return detector.snapshot()


def test_who_never_came_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = snapshot_of(monkeypatch, 0, 3, recorded("completed", "completed", "scheduled"))
    absent = snapshot_of(monkeypatch, 1, 2, recorded("completed", "completed"))
    absent.operation, absent.call, absent.phrase, absent.on_device = "", 0, "after optimizer.step (call 3)", False
    absent.wait = "waiting in all_gather at x.py:1"
    assert _may_be_reported([there, absent], one_machine=True)
    message = diagnose_standstill([there, absent]).line()
    assert message.startswith("error: rank 1 skipped a collective: it is after optimizer.step (call 3)")
    assert (
        "rank 0 is in optimizer.step (call 3), waiting for its GPU in item at optimizer.py:9, behind all_reduce of "
        "4x8 Float on the group of ranks 0 and 1"
    ) in message


def test_a_gpu_that_may_be_computing_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have launched the same collective: one of them may compute before it."""
    both = [snapshot_of(monkeypatch, rank, 2, recorded("completed", "scheduled")) for rank in range(2)]
    assert not _may_be_reported(both, one_machine=True)


def test_ranks_that_launched_different_collectives_wait_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    one = snapshot_of(monkeypatch, 0, 2, recorded("completed", "scheduled"))
    other = snapshot_of(monkeypatch, 1, 2, [*recorded("completed"), entry(2, "broadcast", "scheduled")])
    assert _may_be_reported([one, other], one_machine=True)
