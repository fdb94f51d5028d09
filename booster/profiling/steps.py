"""StepProfile: traces some training steps of this rank, and their memory."""

from __future__ import annotations

import atexit
import functools
import gc
import json
import resource
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from booster.logging import get_logger

_LARGEST = 30  # entries of the report
_KIB = 1024


def memory_of_this_rank(names: Mapping[int, str]) -> dict[str, Any]:
    """Return a report that JSON can hold.

    Args:
        names: address of a parameter -> its name.

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
        num_steps: steps to trace.
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
