"""Recording of a pipeline's actions during training, for `booster inspect --recorded`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh
from plugins.hybrid_parallel.pipeline.schedule import Action, Kind
from plugins.hybrid_parallel.pipeline.simulate import TimedAction, Timeline


class ScheduleRecorder:
    """Records the times of a pipeline's actions; on a GPU, device times.

    Each step starts with a barrier of the pipeline's ranks, which is time 0 for all of them. Only one pipeline is
    recorded: the first replica's, on the first tensor-parallel ranks.

    Args:
        directory: receives a file of JSON lines for each rank of the pipeline.
    """

    def __init__(self, directory: Path, mesh: HybridMesh) -> None:
        self._mesh = mesh
        self._is_first = mesh.rank(DP_CP) == mesh.rank("tp") == 0
        self._path = directory / f"rank{mesh.rank('pp')}.jsonl"
        self._step = 0
        self._marks: list[tuple[Action, Any, Any]] | None = None  # of the present step
        if self._is_first:
            directory.mkdir(parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record a training step."""
        self._step, self._marks = self._step + 1, []
        dist.barrier(group=self._mesh.group("pp"))
        begin = self._now()
        yield
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize()
        if self._is_first:
            actions = [
                [
                    action.kind.value,
                    action.stage,
                    action.microbatch,
                    self._between(begin, start),
                    self._between(begin, end),
                ]
                for action, start, end in self._marks
            ]
            with self._path.open("a") as file:
                file.write(json.dumps({"step": self._step, "actions": actions}) + "\n")
        self._marks = None

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Record one action, from the time its inputs have arrived."""
        start = self._now()
        yield
        if self._marks is not None:
            self._marks.append((action, start, self._now()))

    def _now(self) -> Any:
        if self._mesh.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def _between(begin: Any, end: Any) -> float:
        """Return the milliseconds between two times."""
        return (end - begin) * 1e3 if isinstance(begin, float) else begin.elapsed_time(end)


def read_timelines(directory: Path) -> dict[int, Timeline]:
    """Read the timeline of each recorded step, in milliseconds."""
    paths = sorted(directory.glob("rank*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank")))
    if not paths:
        raise ConfigurationError(
            f"{directory} holds no recording; train with HybridParallelPlugin(record_schedule=...) first"
        )
    try:
        ranks = [{line["step"]: _timed(line["actions"]) for line in map(json.loads, path.open())} for path in paths]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"the recording in {directory} is damaged ({error}); record it again") from error
    steps = sorted(set.intersection(*map(set, ranks)))
    if not steps:
        raise ConfigurationError(f"the recording in {directory} has no step of all ranks; let one step finish")
    return {step: Timeline([rank[step] for rank in ranks]) for step in steps}


def _timed(actions: list[list[Any]]) -> list[TimedAction]:
    return [TimedAction(Action(Kind(kind), stage, index), begin, end) for kind, stage, index, begin, end in actions]
