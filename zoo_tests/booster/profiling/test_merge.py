"""Traces of ranks become one: processes by rank, one clock, arrows that stay apart, and the pipeline's picture."""

from __future__ import annotations

from typing import Any

from booster.profiling import PIPELINE_MARK, RankTrace, merged


def _trace(rank: int, base_ns: int = 0, more: tuple[dict[str, Any], ...] = ()) -> RankTrace:
    place = {"pid": 4000 + rank, "tid": 77}
    action = f"{PIPELINE_MARK}forward 0, stage {rank}"
    events = [
        {"ph": "M", "name": "process_name", "ts": 0, "args": {"name": "python"}, **place},
        {"ph": "M", "name": "thread_name", "ts": 0, "args": {"name": "main"}, **place},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 10.0, "dur": 2.0, **place},
        {"ph": "X", "cat": "user_annotation", "name": action, "ts": 9.0, "dur": 4.0, **place},
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 5, "ts": 10.0, **place},
        {"ph": "f", "cat": "fwdbwd", "name": "fwdbwd", "id": 5, "ts": 20.0, **place},
        {"ph": "i", "name": "[memory]", "ts": 11.0, "args": {"Total Allocated": 64, "Device Type": 0}, **place},
        {"ph": "X", "cat": "Trace", "name": "Profiler", "ts": 0, "dur": 9, "pid": "Spans", "tid": "PyTorch"},
        *more,
    ]  # fmt: skip
    return RankTrace(rank, events, base_ns)


def _of(trace: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if wanted.items() <= event.items()]


def test_a_process_for_each_rank() -> None:
    trace = merged([_trace(0), _trace(1)])
    names = {event["pid"]: event["args"]["name"] for event in _of(trace, name="process_name")}
    assert names == {0: "rank 0", 1: "rank 1", 2: "pipeline"}
    assert [event["pid"] for event in _of(trace, name="aten::mm")] == [0, 1]
    assert all(isinstance(event["pid"], int) for event in trace["traceEvents"])


def test_the_pipeline_has_a_row_for_each_rank() -> None:
    trace = merged([_trace(0), _trace(1)])
    actions = _of(trace, pid=2, ph="X")
    assert [(event["tid"], event["name"], event["ts"], event["dur"]) for event in actions] == [
        (0, "forward 0, stage 0", 9.0, 4.0), (1, "forward 0, stage 1", 9.0, 4.0),
    ]  # fmt: skip
    assert [event["args"]["name"] for event in _of(trace, pid=2, name="thread_name")] == ["rank 0", "rank 1"]


def test_on_a_gpu_the_kernels_count() -> None:
    name = f"{PIPELINE_MARK}forward 0, stage 0"
    gpu = {"ph": "X", "cat": "gpu_user_annotation", "name": name, "ts": 30.0, "dur": 8.0, "pid": 0, "tid": 7}
    actions = _of(merged([_trace(0, more=(gpu,))]), cat="pipeline")
    assert [(event["ts"], event["dur"]) for event in actions] == [(30.0, 8.0)]


def test_one_clock() -> None:
    trace = merged([_trace(0, base_ns=5_000), _trace(1, base_ns=8_000)])
    assert trace["baseTimeNanoseconds"] == 5_000
    assert [event["ts"] for event in _of(trace, name="aten::mm")] == [10.0, 13.0]
    assert [event["ts"] for event in _of(trace, cat="pipeline")] == [9.0, 12.0]


def test_arrows_stay_apart() -> None:
    trace = merged([_trace(0), _trace(1)])
    begins, ends = _of(trace, ph="s"), _of(trace, ph="f")
    assert [event["id"] for event in begins] == [event["id"] for event in ends]
    assert len({event["id"] for event in begins}) == 2


def test_memory_is_a_curve() -> None:
    curves = _of(merged([_trace(0), _trace(1)]), ph="C")
    assert [(event["pid"], event["args"]) for event in curves] == [(0, {"allocated": 64}), (1, {"allocated": 64})]


def test_without_a_pipeline_there_is_no_picture() -> None:
    plain = RankTrace(0, [event for event in _trace(0).events if not event["name"].startswith(PIPELINE_MARK)], 0)
    assert {event["pid"] for event in merged([plain])["traceEvents"]} == {0}
