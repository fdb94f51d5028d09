"""Convert a rank's training trace to and from JSON, for sending it to the other ranks of a job."""

from __future__ import annotations

import base64
from dataclasses import asdict
from typing import Any

import numpy

from plugins.hybrid_parallel.verify.module_outputs import Output
from plugins.hybrid_parallel.verify.train import Arrays, RecordedStep, Trace
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
