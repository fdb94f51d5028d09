"""Verify a user's own module: train it unsharded and under a layout on the user's batch, and compare."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError, VerificationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.local_ranks import run_on_local_ranks
from plugins.hybrid_parallel.distributed.mesh import control_group
from plugins.hybrid_parallel.verify.compare import TOLERANCES, Verdict, compare, to_text
from plugins.hybrid_parallel.verify.module_outputs import Output
from plugins.hybrid_parallel.verify.train import Arrays, RecordedStep, Trace, VerifyCase, train_on_rank, train_reference
from shardformer.distributed.process_groups import all_gather_json
from shardformer.distributed.random import random_numbers_apart
from shardformer.shard_spec import Part, ShardSpec


def trace_to_json(trace: Trace) -> dict[str, Any]:
    """Convert a rank's coordinates and steps to JSON; fields of the unsharded training are left out."""
    place = {"stage": trace.stage, "dp_rank": trace.dp_rank, "tp_rank": trace.tp_rank}
    return place | {"steps": [_step_to_json(step) for step in trace.steps]}


def trace_from_json(value: dict[str, Any]) -> Trace:
    """Restore a trace; the inverse of `trace_to_json`."""
    return Trace(**{**value, "steps": [_step_from_json(step) for step in value["steps"]]})


def _step_to_json(step: RecordedStep) -> dict[str, Any]:
    return {
        "loss": step.loss,
        "outputs": [
            {
                "name": output.name,
                "kind": output.kind,
                "spec": None if output.spec is None else asdict(output.spec),
                "parts": {index: _array_to_json(array) for index, array in output.parts.items()},
            }
            for output in step.outputs
        ],
        "gradients": {name: _array_to_json(array) for name, array in step.gradients.items()},
        "weights": {name: _array_to_json(array) for name, array in step.weights.items()},
    }


def _step_from_json(value: dict[str, Any]) -> RecordedStep:
    outputs = [
        Output(
            each["name"],
            each["kind"],
            None if each["spec"] is None else _spec_from_json(each["spec"]),
            {int(index): _array_from_json(array) for index, array in each["parts"].items()},
        )
        for each in value["outputs"]
    ]
    return RecordedStep(
        value["loss"], outputs, _arrays_from_json(value["gradients"]), _arrays_from_json(value["weights"])
    )


def _spec_from_json(value: dict[str, Any]) -> ShardSpec:
    parts = tuple(Part(**part) for part in value["parts"])
    return ShardSpec(**{**value, "full_shape": tuple(value["full_shape"]), "parts": parts})


def _arrays_from_json(values: dict[str, Any]) -> Arrays:
    return {name: _array_from_json(array) for name, array in values.items()}


def _array_to_json(array: numpy.ndarray) -> dict[str, Any]:
    data = base64.b64encode(numpy.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def _array_from_json(value: dict[str, Any]) -> numpy.ndarray:
    data = base64.b64decode(value["data"])
    return numpy.frombuffer(data, dtype=value["dtype"]).reshape(value["shape"]).copy()


_SEED = 1


@dataclass(frozen=True)
class OwnModel:
    """User's model and batch, from which every process builds identical copies."""

    model_fn: Callable[[], nn.Module]  # builds the model
    given: Mapping[str, Any]  # the global batch of every step
    dtype: torch.dtype  # dtype of the weights and of floating-point tensors in the batch

    @property
    def name(self) -> str:
        """Name of the model for messages."""
        return getattr(self.model_fn, "__qualname__", type(self.model_fn).__name__)

    def build(self) -> nn.Module:
        """Build the model in training mode, on the CPU, without dropout."""
        with random_numbers_apart(_SEED):
            model = self.model_fn().to(device="cpu", dtype=self.dtype).train()
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
        return model

    def batch(self, model: nn.Module, step: int, rows: int) -> dict[str, Any]:
        """Return the user's batch, the same in every step."""
        return {
            name: value.to(device="cpu", dtype=self.dtype if value.is_floating_point() else None)
            if isinstance(value, Tensor)
            else value
            for name, value in self.given.items()
        }


@dataclass(frozen=True)
class Report:
    """Result of a verification; `str` formats it as text."""

    title: str  # the model and its layout
    precision: str  # precision of both trainings
    verdict: Verdict  # verdict of the comparison

    @property
    def equal(self) -> bool:
        """Whether all losses, gradients and weights of both trainings agree."""
        return self.verdict.first is None

    def __str__(self) -> str:
        return "\n".join([self.title, *to_text(self.verdict, self.precision)])


@random_numbers_apart(_SEED)
def verify_own_model(
    model_fn: Callable[[], nn.Module],
    batch: Mapping[str, Any],
    config: HybridParallelConfig,
    *,
    criterion: Callable[[Any, Any], Any] | None = None,
    steps: int = 2,
    precision: str = "fp64",
    timeout_s: float = 300.0,
) -> Report:
    """Implement `booster.verify`; see there."""
    if precision not in TOLERANCES:
        raise ConfigurationError(f"precision='{precision}' cannot be compared in; use {' or '.join(TOLERANCES)}")
    rows = next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()), 0)
    if rows == 0:
        raise ConfigurationError("the batch holds no samples; give a mapping with tensors [samples, ...]")
    options, parallel = config.options() | {"precision": "fp32"}, config.parallel
    subject = OwnModel(model_fn, batch, torch.float64 if precision == "fp64" else torch.float32)
    in_a_job = dist.is_initialized() and dist.get_world_size() > 1
    world_size = dist.get_world_size() if in_a_job else parallel.tp_size * parallel.pp_size * parallel.cp_size
    if not in_a_job:
        world_size *= parallel.dp_size or parallel.ep_size
        options["dp_size"] = parallel.dp_size or parallel.ep_size
    trial = VerifyCase(subject, rows, steps, options, criterion)
    plain = train_reference(trial)
    if in_a_job:
        found = all_gather_json(trace_to_json(train_on_rank(trial)), control_group())
        ranks = [trace_from_json(each) for each in found]
    else:
        ranks = run_on_local_ranks(train_on_rank, world_size, trial, timeout_s=timeout_s)
    sizes = " x ".join(
        f"{axis} {size}" for axis in ("tp", "pp", "cp") if (size := getattr(parallel, f"{axis}_size")) > 1
    )
    title = (
        f"{subject.name}, {sizes or 'data parallel'}, {world_size} ranks, {precision}, {steps} steps of {rows} samples"
    )
    report = Report(title, precision, compare(plain, ranks, TOLERANCES[precision]))
    if not report.equal:
        raise VerificationError(str(report))
    return report
