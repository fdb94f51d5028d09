"""The JSON description of model parallelism: how many shards and stages, which dim is cut, which device holds what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.config.pydantic_errors import described, sentences, unknown_key
from plugins.hybrid_parallel.distributed.device_mapping import check_mapping

# What the description decides, and so nobody else may.
_DECIDED = {"tp_size": "sharding_size", "pp_size": "stage_cnt", "num_microbatches": "accum_degree"}

_COUNT = "is not a positive integer; use 1 or more"
_Count = Annotated[StrictInt, Field(ge=1)]


class ParallelDescription(BaseModel):
    """One JSON object.

    Attributes:
        mode: "sharding" cuts layers over devices, stages one after the other; "pipeline" gives stages to devices and
            micro-batches to stages; "hybrid" does both.
        sharding_size: devices that share each layer.
        sharding_dim: 0 cuts the reduction dim of every layer and adds partial sums, -1 the output dim and gathers; None
            pairs the two, as Megatron-LM does.
        stage_cnt: stages that the layers are cut into.
        accum_degree: micro-batches before a step of the optimizer.
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
        """What does not fit together, in sentences."""
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
        """The same as options of `HybridParallelPlugin`."""
        return {
            "tp_size": self.sharding_size,
            "pp_size": self.stage_cnt,
            "num_microbatches": self.accum_degree,
            "sharding_dim": self.sharding_dim,
            "device_mapping": self.device_mapping,
        }


def is_description(values: Mapping[str, Any]) -> bool:
    """Whether a JSON object has any key of a description, which options of the plugin have not."""
    own = set(ParallelDescription.model_fields) - {field.name for field in fields(HybridParallelConfig)}
    return not own.isdisjoint(values)


def options_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `HybridParallelPlugin` that a description means, and those that stand beside it.

    Raises:
        ConfigurationError: a key that neither has, or values that do not fit, one sentence each.
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
            problems.append(f"{name} stands beside mode=...; use {_DECIDED[name]} there")
        elif name not in known:
            problems.append(unknown_key(name, known))
    return problems
