"""`booster run --profile N`: a trace of N training steps of all ranks, and what their memory holds.

The launcher sets two variables; `Booster.boost` then starts a `StepProfile` on each rank, which writes its own files.
When the job has ended, the launcher merges them (`JobProfile`). Ranks do not communicate for it.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import resource
import shutil
import socket
import tempfile
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from booster.errors import ConfigurationError
from booster.logging import get_logger

PIPELINE_MARK = "pipeline: "  # begins the names of annotations that are actions of a pipeline
_ANNOTATIONS = ("gpu_user_annotation", "user_annotation")  # on a GPU, when its kernels ran; else when the host did
_OWN_METADATA = ("process_name", "process_labels", "process_sort_index")
Event = dict[str, Any]


@dataclass(frozen=True)
class RankTrace:
    """The trace of a rank."""

    rank: int  # global rank
    events: list[Event]  # the events that torch wrote
    base_ns: int  # what their times are counted from

    @classmethod
    def read(cls, rank: int, path: Path) -> RankTrace:
        """Read a file that `torch.profiler` exported."""
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        return cls(rank, content["traceEvents"], content.get("baseTimeNanoseconds", 0))


def merged(traces: list[RankTrace]) -> dict[str, Any]:
    """Return one trace for chrome://tracing and ui.perfetto.dev.

    The process number of an event is its rank. A further process, "pipeline", has a row for each rank with the actions
    of its stages. Times of ranks on one machine are those of one clock.
    """
    base_ns = min((trace.base_ns for trace in traces), default=0)
    world_size = 1 + max((trace.rank for trace in traces), default=0)
    events: list[Event] = []
    for trace in traces:
        shift_us = (trace.base_ns - base_ns) / 1e3
        events += _process(trace.rank, f"rank {trace.rank}", trace.rank + 1)
        events += (_of_rank(event, trace.rank, world_size, shift_us) for event in _kept(trace.events))
    actions = [event for trace in traces for event in _actions(trace, world_size, (trace.base_ns - base_ns) / 1e3)]
    if actions:
        events += _process(world_size, "pipeline", 0)
        for rank in sorted({event["tid"] for event in actions}):
            row = {"ph": "M", "pid": world_size, "tid": rank, "ts": 0}
            events.append({**row, "name": "thread_name", "args": {"name": f"rank {rank}"}})
            events.append({**row, "name": "thread_sort_index", "args": {"sort_index": rank}})
    return {"traceEvents": [*events, *actions], "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns}


def _process(pid: int, name: str, position: int) -> Iterator[Event]:
    """Yield the name of a process, and its position from the top."""
    for key, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": position})):
        yield {"ph": "M", "pid": pid, "tid": 0, "ts": 0, "name": key, "args": args}


def _kept(events: list[Event]) -> Iterator[Event]:
    """Leave out the names of processes, and events of the profiler about itself, whose process is no number."""
    return (event for event in events if isinstance(event.get("pid"), int) and event["name"] not in _OWN_METADATA)


def _of_rank(event: Mapping[str, Any], rank: int, world_size: int, shift_us: float) -> Event:
    """Return an event as one of the process of a rank; arrows keep apart by their number."""
    own = {**event, "pid": rank, "ts": event["ts"] + shift_us}
    if event["ph"] in "stf":
        own["id"] = int(event["id"]) * world_size + rank
    if event["name"] == "[memory]":
        args = event["args"]
        where = f"cuda:{args['Device Id']}" if args.get("Device Type") else "cpu, since the trace began"
        curve = {"ph": "C", "name": f"bytes allocated, {where}", "args": {"allocated": args["Total Allocated"]}}
        own = {key: own[key] for key in ("pid", "tid", "ts")} | curve
    return own


def _actions(trace: RankTrace, pid: int, shift_us: float) -> Iterator[Event]:
    """Yield the actions of a pipeline that a rank ran, as events of the row of the rank."""
    found = [event for event in trace.events if str(event.get("name", "")).startswith(PIPELINE_MARK)]
    kinds = {event.get("cat") for event in found}
    kind = next((each for each in _ANNOTATIONS if each in kinds), None)
    for event in found:
        if event.get("cat") == kind and event["ph"] == "X":
            name = event["name"].removeprefix(PIPELINE_MARK)
            span = {"ts": event["ts"] + shift_us, "dur": event["dur"]}
            yield {"ph": "X", "pid": pid, "tid": trace.rank, "name": name, "cat": "pipeline", **span}


class JobProfile:
    """The profile of the ranks that this launcher starts.

    Args:
        folder: receives `trace.json`, `memory.json`, and snapshots of GPUs; if there are several machines, names of
            files end with that of the machine.
    """

    def __init__(self, num_steps: int, folder: Path, alone: bool = True) -> None:
        self.num_steps, self.folder = num_steps, folder.absolute()
        self._suffix = "" if alone else f"-{socket.gethostname()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.scratch = Path(tempfile.mkdtemp(prefix=".ranks-", dir=self.folder))
        except OSError as error:
            raise ConfigurationError(
                f"--profile cannot write to {folder} ({error.strerror}); give another folder with --profile-output"
            ) from None

    def finish(self) -> str:
        """Merge what the ranks wrote; return one sentence for the user."""
        try:
            return self._merge()
        except (OSError, ValueError, KeyError) as error:
            return f"no profile was written: {error}"
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _merge(self) -> str:
        ranks: dict[int, dict[str, Any]] = {
            int(path.stem.removeprefix("rank")): json.loads(path.read_text(encoding="utf-8"))
            for path in self.scratch.glob("rank*.json")
            if path.stem.removeprefix("rank").isdecimal()
        }
        traced = {rank: found for rank, found in sorted(ranks.items()) if found["steps"]}
        if not ranks:
            return "no profile was written: the script gave no model with an optimizer to booster.boost"
        if not traced:
            return (
                f"no profile was written: the script ended before the first of the {self.num_steps} steps to profile, "
                "which follow a step of warm-up"
            )
        traces = [RankTrace.read(rank, self.scratch / found["trace"]) for rank, found in traced.items()]
        trace = self.folder / f"trace{self._suffix}.json"
        trace.write_text(json.dumps(merged(traces)), encoding="utf-8")
        memory = {"ranks": [{"rank": rank, **found["memory"]} for rank, found in traced.items()]}
        (self.folder / f"memory{self._suffix}.json").write_text(json.dumps(memory, indent=1) + "\n", encoding="utf-8")
        for snapshot in self.scratch.glob("rank*.pickle"):
            snapshot.replace(self.folder / f"memory_{snapshot.name}")
        steps = min(found["steps"] for found in traced.values())
        where = f"{trace}, and their memory in {self.folder / f'memory{self._suffix}.json'}"
        if steps < self.num_steps:
            return f"the script ended after {steps} of the {self.num_steps} steps to profile; they are in {where}"
        return f"the profile of {_counted(steps, 'step')} on {_counted(len(traced), 'rank')} is in {where}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_LARGEST = 30  # entries of the report
_KIB = 1024


def memory_of_this_rank(names: Mapping[int, str]) -> dict[str, Any]:
    """Return a report that JSON can hold.

    Returns:
        `peak_resident_bytes` of the process so far; on a GPU `peak_allocated_bytes` and `peak_reserved_bytes`;
        `tensor_bytes` of all tensors, and the largest `tensors`: those of one shape, dtype and device together, with
        the name of the first if it is a parameter. A storage that several tensors share counts once.
    """
    report: dict[str, Any] = {"peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB}
    if torch.cuda.is_available():
        report["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        report["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    groups: dict[tuple, dict[str, Any]] = {}
    for tensor, num_bytes in _storages():
        shape, dtype, device = list(tensor.shape), str(tensor.dtype).removeprefix("torch."), str(tensor.device)
        new = {"shape": shape, "dtype": dtype, "device": device, "count": 0, "bytes": 0, "parameter": None}
        group = groups.setdefault((*shape, dtype, device), new)
        group["count"] += 1
        group["bytes"] += num_bytes
        group["parameter"] = group["parameter"] or names.get(tensor.data_ptr())
    largest = sorted(groups.values(), key=lambda group: -group["bytes"])
    return report | {"tensor_bytes": sum(group["bytes"] for group in largest), "tensors": largest[:_LARGEST]}


def _storages() -> Iterator[tuple[Tensor, int]]:
    """Yield the largest tensor of each storage that Python knows, and the storage's bytes."""
    found: dict[tuple[str, int], Tensor] = {}
    for each in gc.get_objects():
        if not issubclass(type(each), Tensor) or each.layout is not torch.strided or each.device.type == "meta":
            continue
        try:
            place = str(each.device), each.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # a tensor subclass without a storage
            continue
        if place[1] and (place not in found or each.nbytes > found[place].nbytes):
            found[place] = each
    for tensor in found.values():
        yield tensor, tensor.untyped_storage().nbytes()


_logger = get_logger(__name__)
_WARMUP = 1  # steps: the first one allocates and compiles, and the profiler itself is slow in it
_MOST_ALLOCATIONS = 100_000  # events of the snapshot's history


class StepProfile:
    """Traces the steps of an optimizer after the first one, and writes them to files of this rank.

    A file that cannot be written is a warning: training goes on.

    Args:
        folder: receives `rankN.json` (what was written), `rankN.trace.json` and, on a GPU, `rankN.pickle`.
        model: the boosted model, for the names of its parameters; None if there is none.
    """

    def __init__(self, num_steps: int, folder: Path, model: nn.Module | None = None) -> None:
        self.num_steps, self.folder, self.model = num_steps, folder, model
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ended_steps = 0
        self._has_gpu = ProfilerActivity.CUDA in supported_activities() and torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._has_gpu else [])]
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=_WARMUP, active=num_steps, repeat=1),
            on_trace_ready=self._write,
            profile_memory=True,
            acc_events=True,  # otherwise torch warns that the events of one cycle are not those of another
        )
        self._is_over = False

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the steps of an optimizer from now on."""
        step = optimizer.step

        @functools.wraps(step)
        def counted_step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self.end_step()
            return result

        # On this object alone; a method, as learning-rate schedulers of torch wrap it once more.
        optimizer.step = types.MethodType(counted_step, optimizer)
        self._save({"steps": 0})
        self._profiler.start()
        atexit.register(self.close)

    def end_step(self) -> None:
        """Note that a step has ended."""
        if self._is_over:
            return
        self.ended_steps += 1
        if self._has_gpu and self.ended_steps == _WARMUP:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        self._profiler.step()
        if self.ended_steps == _WARMUP + self.num_steps:
            self.close()

    def close(self) -> None:
        """Write what was traced, if the script ends early."""
        if not self._is_over:
            self._is_over = True
            self._profiler.stop()
            atexit.unregister(self.close)

    def _write(self, profiler: profile) -> None:
        steps = self.ended_steps - _WARMUP
        if steps <= 0:
            return
        trace = f"rank{self.rank}.trace.json"
        try:
            memory = memory_of_this_rank(self._names())
            if self._has_gpu:
                torch.cuda.memory._dump_snapshot(str(self.folder / f"rank{self.rank}.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
            profiler.export_chrome_trace(str(self.folder / trace))
        except (OSError, RuntimeError) as error:
            _logger.warning("the profile of rank %d cannot be written: %s", self.rank, error)
            return
        self._save({"steps": steps, "trace": trace, "memory": memory})

    def _save(self, description: Mapping[str, Any]) -> None:
        try:
            (self.folder / f"rank{self.rank}.json").write_text(json.dumps(description), encoding="utf-8")
        except OSError as error:
            _logger.warning("the profile of rank %d cannot be written: %s", self.rank, error)

    def _names(self) -> dict[int, str]:
        """Return the names of the model's parameters by their addresses."""
        parameters = () if self.model is None else self.model.named_parameters()
        return {param.data_ptr(): name for name, param in parameters}
