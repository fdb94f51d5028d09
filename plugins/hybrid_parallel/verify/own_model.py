"""Verify a user's own module: train it unsharded and under a layout on the user's batch, and compare."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn

from booster.errors import ConfigurationError, VerificationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.local_ranks import run_on_local_ranks
from plugins.hybrid_parallel.distributed.mesh import control_group
from plugins.hybrid_parallel.verify.compare import TOLERANCES, Verdict, compare, to_text
from plugins.hybrid_parallel.verify.module_outputs import Output
from plugins.hybrid_parallel.verify.random_batch import cast, rows_of
from plugins.hybrid_parallel.verify.tiny_model import without_dropout
from plugins.hybrid_parallel.verify.train import RecordedStep, Trace, VerifyCase, train_on_rank, train_reference
from shardformer.distributed.process_groups import all_gather_json
from shardformer.distributed.random import random_numbers_apart
from shardformer.shard_spec import Part, ShardSpec

_CLASSES = {each.__name__: each for each in (Trace, RecordedStep, Output, ShardSpec, Part)}


def trace_to_json(trace: Trace) -> str:
    """Write what a rank has recorded as JSON."""
    return json.dumps(trace, default=_as_object)


def trace_from_json(text: str) -> Trace:
    """Read a trace; the inverse of `trace_to_json`."""
    return json.loads(text, object_hook=_from_object)


def _as_object(value: Any) -> dict[str, Any]:
    if isinstance(value, numpy.ndarray):
        data = base64.b64encode(numpy.ascontiguousarray(value).tobytes()).decode()
        return {"$array": data, "dtype": value.dtype.str, "shape": value.shape}
    return {"$class": type(value).__name__} | {each.name: getattr(value, each.name) for each in fields(value)}


def _from_object(parts: dict[str, Any]) -> Any:
    if "$array" in parts:
        return numpy.frombuffer(base64.b64decode(parts["$array"]), parts["dtype"]).reshape(parts["shape"]).copy()
    kind = _CLASSES.get(parts.pop("$class", None))
    if kind is Output:
        parts["parts"] = {int(index): array for index, array in parts["parts"].items()}
    elif kind is ShardSpec:
        parts |= {name: tuple(parts[name]) for name in ("full_shape", "parts")}
    return parts if kind is None else kind(**parts)


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
            return without_dropout(self.model_fn().to(device="cpu", dtype=self.dtype).train())

    def batch(self, model: nn.Module, step: int, rows: int) -> dict[str, Any]:
        """Return the user's batch, the same in every step."""
        return cast(self.given, self.dtype)


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
    rows = rows_of(batch)
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
