"""JSON description of model parallelism: numbers of shards and stages, the sharded dim, and the device mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.config.pydantic_errors import described, sentences, unknown_key
from plugins.hybrid_parallel.distributed.device_mapping import check_mapping

# Options that the description sets, so they must not be given in addition to it.
_DECIDED = {"tp_size": "sharding_size", "pp_size": "stage_cnt", "num_microbatches": "accum_degree"}

_COUNT = "is not a positive integer; use 1 or more"
_Count = Annotated[StrictInt, Field(ge=1)]


class ParallelDescription(BaseModel):
    """JSON object that describes the model parallelism.

    Attributes:
        mode: "sharding" shards layers over devices and runs stages one after the other; "pipeline" assigns stages to
            devices and micro-batches to stages; "hybrid" does both.
        sharding_size: number of devices that share each layer.
        sharding_dim: 0 shards the reduction dim of every layer and adds partial sums; -1 shards the output dim and
            gathers; None pairs the two, as in Megatron-LM.
        stage_cnt: number of stages that the layers are split into.
        accum_degree: number of micro-batches per optimizer step.
        device_mapping: {"stage_0": {"shard_0": device, ...}, ...}; None for ranks in order.
    """

    model_config = ConfigDict(extra="forbid")

    mode: Literal["sharding", "pipeline", "hybrid"] = described(
        ..., "is not available; use 'sharding', 'pipeline' or 'hybrid'", "hybrid"
    )
    sharding_size: _Count = described(1, _COUNT, 2)
    sharding_dim: Literal[0, -1] | None = described(
        None, "is no dim; use 0 (reduction), -1 (output) or leave it out", -1
    )
    stage_cnt: _Count = described(1, _COUNT, 2)
    accum_degree: _Count = described(1, _COUNT, 4)
    device_mapping: dict[str, dict[str, Any]] | None = described(
        None, "is no mapping; use {'stage_0': {'shard_0': 'cuda:0'}}", {"stage_0": {"shard_0": "cuda:0"}}
    )

    def problems(self) -> list[str]:
        """Return conflicts between the fields, one sentence each."""
        found = []
        if self.mode == "pipeline" and self.sharding_size > 1:
            found.append(
                f"mode='pipeline' does not shard layers, and sharding_size={self.sharding_size} does; "
                "use mode='hybrid' or sharding_size=1"
            )
        if self.mode == "sharding" and self.stage_cnt > 1 and self.accum_degree > 1:
            found.append(
                f"mode='sharding' runs its stages one after the other, and accum_degree={self.accum_degree} pipelines "
                "micro-batches through them; use mode='hybrid' or accum_degree=1"
            )
        if self.device_mapping is not None:
            found += check_mapping(self.device_mapping, self.stage_cnt, self.sharding_size)
        return found

    def options(self) -> dict[str, Any]:
        """Return the description as options of `HybridParallelPlugin`."""
        return {
            "tp_size": self.sharding_size,
            "pp_size": self.stage_cnt,
            "num_microbatches": self.accum_degree,
            "sharding_dim": self.sharding_dim,
            "device_mapping": self.device_mapping,
        }


def is_description(values: Mapping[str, Any]) -> bool:
    """Return whether a JSON object has any key that belongs to a description and is not an option of the plugin."""
    own = set(ParallelDescription.model_fields) - {field.name for field in fields(HybridParallelConfig)}
    return not own.isdisjoint(values)


def options_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a description, and any plugin options given next to it, to options of `HybridParallelPlugin`.

    Raises:
        ConfigurationError: a key is unknown or a value is invalid; one sentence for each problem.
    """
    described = {name: value for name, value in values.items() if name in ParallelDescription.model_fields}
    beside = {name: value for name, value in values.items() if name not in described}
    problems = _unknown(beside)
    try:
        description = ParallelDescription(**described)
    except ValidationError as error:
        problems += sentences(error, ParallelDescription)
    else:
        problems += description.problems()
    if problems:
        raise ConfigurationError("; ".join(problems))
    return {**beside, **description.options()}


def _unknown(beside: Mapping[str, Any]) -> list[str]:
    options = [field.name for field in fields(HybridParallelConfig)]
    known = [*ParallelDescription.model_fields, *options]
    problems = []
    for name in beside:
        if name in _DECIDED:
            problems.append(f"{name} cannot be combined with mode=...; use {_DECIDED[name]} there")
        elif name not in known:
            problems.append(unknown_key(name, known))
    return problems
