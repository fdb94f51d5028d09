"""Convert DeepSpeed's configuration to options of the plugin; keys without an equivalent are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, ValidationError

from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.compat.deepspeed_3d.optimizers import OptimizerBlock
from plugins.hybrid_parallel.compat.deepspeed_3d.pydantic_errors import described, sentences
from plugins.hybrid_parallel.compat.deepspeed_3d.schedules import SchedulerBlock
from shardformer.utils.json import read_json_object

_logger = get_logger(__name__)
_COUNT = "is not a positive integer; use 1 or more"
_SWITCH = "is neither true nor false; use one of them"
_SIZE = "is not a positive number of elements; use one such as 5e8"
_Count = Annotated[StrictInt, Field(ge=1)]
_Size = Annotated[StrictFloat, Field(gt=0)]
_BYTES_OF_A_GRADIENT = 4  # gradient buckets are fp32


class Fp16(BaseModel):
    """Block `fp16`: half precision with a loss scale that halves on every overflow."""

    model_config = ConfigDict(extra="forbid")

    enabled: StrictBool = described(False, _SWITCH, True)
    loss_scale: Literal[0] = described(
        0, "fixes the loss scale, which is always dynamic here; use 0 and initial_scale_power", 0
    )
    initial_scale_power: Annotated[StrictInt, Field(ge=0)] = described(
        16, "is not an integer of 0 or more; use one such as 16", 16
    )
    loss_scale_window: _Count = described(1000, _COUNT, 1000)
    hysteresis: Literal[1] | None = described(
        None, "has no equivalent, since every overflow halves the scale; use 1, or leave it out", 1
    )
    min_loss_scale: Literal[1] = described(1, "has no equivalent, since the scale stays at 1 or above; use 1", 1)
    consecutive_hysteresis: Literal[False] = described(False, "has no equivalent; use false, or leave it out", False)
    auto_cast: Literal[False] = described(
        False, "has no equivalent, since the model itself is cast; use false, or leave it out", False
    )


class Bf16(BaseModel):
    """Block `bf16`."""

    model_config = ConfigDict(extra="forbid")

    enabled: StrictBool = described(False, _SWITCH, True)


class Zero(BaseModel):
    """Block `zero_optimization`. The fields in `_LEFT` do not affect results; they are accepted and ignored."""

    model_config = ConfigDict(extra="forbid")

    stage: Literal[0, 1] = described(
        0, "shards gradients or parameters over replicas, which is not available; use 0 or 1, and tp or pp for more", 1
    )
    reduce_bucket_size: _Size | None = described(None, _SIZE, 5e8)
    overlap_comm: StrictBool | None = described(None, _SWITCH, True)
    allgather_bucket_size: _Size | None = described(None, _SIZE, 5e8)
    allgather_partitions: StrictBool | None = described(None, _SWITCH, True)
    reduce_scatter: StrictBool | None = described(None, _SWITCH, True)
    contiguous_gradients: StrictBool | None = described(None, _SWITCH, True)
    round_robin_gradients: StrictBool | None = described(None, _SWITCH, False)


_LEFT = (
    "allgather_bucket_size",
    "allgather_partitions",
    "reduce_scatter",
    "contiguous_gradients",
    "round_robin_gradients",
)


class DeepSpeedConfig(BaseModel):
    """DeepSpeed's configuration. Omitted keys have DeepSpeed's defaults.

    Attributes:
        train_batch_size: samples of a step, over all replicas.
        train_micro_batch_size_per_gpu: samples of a micro-batch of one replica.
        gradient_accumulation_steps: micro-batches of a step.
        gradient_clipping: maximum global gradient norm; 0 for no clipping.
        fp16, bf16, zero_optimization, optimizer, scheduler: see their classes.
        steps_per_print, wall_clock_breakdown: control DeepSpeed's output; accepted and ignored.
    """

    model_config = ConfigDict(extra="forbid")

    train_batch_size: _Count | None = described(None, _COUNT, 32)
    train_micro_batch_size_per_gpu: _Count | None = described(None, _COUNT, 4)
    gradient_accumulation_steps: _Count | None = described(None, _COUNT, 8)
    gradient_clipping: Annotated[StrictFloat, Field(ge=0)] = described(
        0.0, "is not a number of 0 or more; use one such as 1.0", 1.0
    )
    fp16: Fp16 = described(Fp16(), "is no object; use {'enabled': true}", {"enabled": True})
    bf16: Bf16 = described(Bf16(), "is no object; use {'enabled': true}", {"enabled": True})
    zero_optimization: Zero = described(Zero(), "is no object; use {'stage': 1}", {"stage": 1})
    optimizer: OptimizerBlock | None = described(None, "is no object; use {'type': 'AdamW'}", {"type": "AdamW"})
    scheduler: SchedulerBlock | None = described(None, "is no object; use {'type': 'WarmupLR'}", {"type": "WarmupLR"})
    steps_per_print: StrictInt | None = described(None, "is not an integer; use one such as 10", 10)
    wall_clock_breakdown: StrictBool | None = described(None, _SWITCH, False)

    def options(self, dp_size: int) -> dict[str, Any]:
        """Convert the configuration to options of `HybridParallelPlugin`.

        Args:
            dp_size: number of replicas.

        Raises:
            ConfigurationError: the batch sizes are inconsistent with this number of replicas.
        """
        zero = self.zero_optimization
        options: dict[str, Any] = {
            "zero_stage": zero.stage,
            "max_norm": self.gradient_clipping or None,
            "precision": "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32",
        }
        if self.fp16.enabled:
            options["initial_scale"] = 2.0**self.fp16.initial_scale_power
            options["growth_interval"] = self.fp16.loss_scale_window
        if zero.reduce_bucket_size is not None:
            options["zero_bucket_size_in_mb"] = zero.reduce_bucket_size * _BYTES_OF_A_GRADIENT / 2**20
        if zero.overlap_comm is not None:
            options["overlap_communication"] = zero.overlap_comm
        _, steps = self.batch_sizes(dp_size)
        return options if steps is None else {**options, "num_microbatches": steps}

    def batch_sizes(self, dp_size: int) -> tuple[int | None, int | None]:
        """Return the samples of a micro-batch and the micro-batches of a step; None for a number that is not given.

        Args:
            dp_size: number of replicas.

        Raises:
            ConfigurationError: the batch sizes are inconsistent with this number of replicas.
        """
        total, micro, steps = (
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
        )
        if total is None:
            return micro, steps or (1 if micro is not None else None)
        if micro is not None and steps is not None and total != micro * steps * dp_size:
            raise ConfigurationError(
                f"train_batch_size={total} is not train_micro_batch_size_per_gpu * gradient_accumulation_steps * "
                f"replicas = {micro} * {steps} * {dp_size}; use {micro * steps * dp_size}, or leave one of them out"
            )
        if micro is None:
            steps = steps or 1
            return _divided(total, steps * dp_size, f"gradient_accumulation_steps={steps}", dp_size), steps
        return micro, _divided(total, micro * dp_size, f"train_micro_batch_size_per_gpu={micro}", dp_size)

    def tell_what_is_left(self) -> None:
        """Log the keys that have no effect here, in one line."""
        left = [name for name in ("steps_per_print", "wall_clock_breakdown") if getattr(self, name) is not None]
        left += [f"zero_optimization.{name}" for name in _LEFT if getattr(self.zero_optimization, name) is not None]
        if left:
            _logger.info("ds_config: %s change nothing here", ", ".join(left))


def read_ds_config(config: str | Path | Mapping[str, Any]) -> DeepSpeedConfig:
    """Read and validate a configuration from a dict or a JSON file.

    Raises:
        ConfigurationError: there is no such file, or the configuration is invalid; one sentence for each problem.
    """
    values = config if isinstance(config, Mapping) else _read(config)
    try:
        found = DeepSpeedConfig(**values)
    except ValidationError as error:
        raise _refusal(sentences(error, DeepSpeedConfig)) from None
    problems = [] if found.optimizer is None else found.optimizer.problems()
    problems += [] if found.scheduler is None else found.scheduler.problems()
    if found.fp16.enabled and found.bf16.enabled:
        problems.append("fp16.enabled and bf16.enabled are both true; use one of them")
    if problems:
        raise _refusal(problems)
    return found


def _refusal(problems: Sequence[str]) -> ConfigurationError:
    return ConfigurationError("; ".join(f"ds_config: {each}" for each in problems))


def _read(path: Any) -> dict[str, Any]:
    if not isinstance(path, str | Path):
        raise ConfigurationError(f"ds_config is a {type(path).__name__}; use a dict, or the path of a JSON file")
    if not Path(path).is_file():
        raise ConfigurationError(f"ds_config={str(path)!r} does not exist; use a dict, or the path of a JSON file")
    try:
        return read_json_object(Path(path))
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def _divided(total: int, divisor: int, name: str, dp_size: int) -> int:
    if total % divisor:
        raise ConfigurationError(
            f"train_batch_size={total} is no multiple of {name} times {dp_size} replicas; "
            f"use {-(-total // divisor) * divisor}"
        )
    return total // divisor
