"""StepProfile: traces some training steps of this rank."""

from __future__ import annotations

import atexit
import functools
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from booster.logging import get_logger
from booster.profiling.memory import memory_of_this_rank

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
