"""`DeepSpeed3DParallelConfig`: configuration of 3D-parallel training, and the `ds_config` that it reads.

Keys without an equivalent are refused by name. The formulas of schedules are DeepSpeed's. As in torch, step 0 is the
first step of the optimizer. DeepSpeed's schedules start one call later, so DeepSpeed has a step without a learning rate
before it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError
from pydantic.fields import FieldInfo
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.compat.deepspeed_3d.patches import LogitHelper, Patch
from plugins.hybrid_parallel.config.option_group import unknown_key
from shardformer import TPInfo
from shardformer.utils.typed_json import read_json_object

AUTO = "auto"


def described(default: Any, rule: str, example: Any) -> Any:
    """Create a field that describes its values; `default`: `...` if required; `rule`: follows a wrong value."""
    return Field(default=default, description=rule, examples=[example])


def auto_value(where: str, example: Any) -> str:
    """Return the sentence about an "auto" value, which transformers' Trainer would have filled in."""
    return f"{where}='{AUTO}' is a value that transformers' Trainer fills in; use one such as {example!r}"


def sentences(error: ValidationError, model: type[BaseModel], where: str = "") -> list[str]:
    """Convert pydantic's errors of a `described` model to sentences; `where`: prefix such as "fp16."."""
    return [_sentence(each, model, where) for each in error.errors()]


def _sentence(error: Any, model: type[BaseModel], where: str) -> str:
    *parents, name = _keys_of_models(error["loc"], model)
    for parent in parents:
        model, where = _model_of(model.model_fields[parent]), f"{where}{parent}."
    if error["type"] == "extra_forbidden":
        return unknown_key(name, model.model_fields, where)
    field = model.model_fields[name]
    if error["type"] == "missing":
        return f"the key '{where}{name}' is missing; use '{name}': {field.examples[0]!r}"
    inner = error["loc"][len(parents) + 1 :]
    if error["input"] == AUTO and not inner:
        return auto_value(f"{where}{name}", field.examples[0])
    path = f"{where}{name}" + "".join(f"[{part!r}]" for part in inner)
    return f"{path}={error['input']!r} {field.description}"


def _keys_of_models(path: Sequence[Any], model: type[BaseModel]) -> list[str]:
    """Return the leading part of a path, down to a key of the innermost model; keys of plain dicts are dropped."""
    keys = []
    for key in path:
        keys.append(key)
        inner = _model_of(model.model_fields[key]) if key in model.model_fields else None
        if inner is None:
            break
        model = inner
    return keys


def _model_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model type of a field, if it holds a model or None."""
    candidates = (field.annotation, *get_args(field.annotation))
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)), None)


# By lower-case name, as DeepSpeed compares them. As in DeepSpeed, "Adam" means AdamW unless `adam_w_mode` is false.
_CLASSES = {
    "adam": torch.optim.AdamW,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
}
_NAMES = "Adam, AdamW, SGD, Adagrad, Adamax, NAdam, RAdam or RMSprop"
_EXAMPLES = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "momentum": 0.9}
_KERNELS = (
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "maximize",
)  # options of torch's implementation, which are not accepted


class OptimizerBlock(BaseModel):
    """Block `optimizer`, such as `{"type": "AdamW", "params": {"lr": 1e-4}}`."""

    model_config = ConfigDict(extra="forbid")

    # name of the optimizer, case-insensitive
    type: StrictStr = described(..., f"is no name of an optimizer; use {_NAMES}", "AdamW")
    # arguments of the optimizer. Adam also takes `adam_w_mode` and `torch_adam`; the latter only selects between
    # equivalent kernels, and is ignored.
    params: dict[str, Any] = described({}, "is no object; use {'lr': 1e-4}", {"lr": 1e-4})

    def problems(self) -> list[str]:
        """Return what is wrong with the block, one sentence for each problem."""
        if self.type.lower() not in _CLASSES:
            return [f"optimizer.type={self.type!r} is not available; use {_NAMES}"]
        known, found = self._known(), []
        for name, value in self.params.items():
            if name not in known:
                found.append(unknown_key(name, known, "optimizer.params."))
            elif value == AUTO:
                found.append(auto_value(f"optimizer.params.{name}", _EXAMPLES.get(name, "a number")))
        if found:
            return found
        try:
            self.build([nn.Parameter(torch.zeros(1))])
        except (ValueError, TypeError) as error:
            torch_class = f"torch.optim.{self._class.__name__}"
            return [f"optimizer.params={self.params} is refused by {torch_class} ({error}); use {{'lr': 1e-4}}"]
        return []

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the optimizer over `parameters`; for Adam, the weight decay defaults to 0, as in DeepSpeed."""
        params = {name: value for name, value in self.params.items() if name not in ("adam_w_mode", "torch_adam")}
        if self._is_adam:
            params.setdefault("weight_decay", 0.0)
        if "betas" in params:
            params["betas"] = tuple(params["betas"])
        return self._class(list(parameters), **params)

    @property
    def _is_adam(self) -> bool:
        return self.type.lower() in ("adam", "adamw")

    @property
    def _class(self) -> type[torch.optim.Optimizer]:
        if self.type.lower() == "adam" and not self.params.get("adam_w_mode", True):
            return torch.optim.Adam
        return _CLASSES[self.type.lower()]

    def _known(self) -> list[str]:
        own = [name for name in inspect.signature(self._class).parameters if name != "params" and name not in _KERNELS]
        if self._is_adam:
            own.append("torch_adam")
        return [*own, "adam_w_mode"] if self.type.lower() == "adam" else own


def check_lr(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a learning rate of 0, because a schedule is a factor on the optimizer's learning rates."""
    if any(not group["lr"] for group in optimizer.param_groups):
        raise ConfigurationError(
            "the optimizer has lr=0, which a scheduler of ds_config cannot scale; use its largest lr"
        )


_LR = "is not a number of 0 or more; use one such as 0.001"
_STEPS = "is not an integer of 0 or more; use one such as 1000"
_RATIO = "is not a share between 0 and 1; use one such as 0.0"
_Lr = Annotated[StrictFloat, Field(ge=0)]
_Steps = Annotated[StrictInt, Field(ge=0)]
_Ratio = Annotated[StrictFloat, Field(ge=0, le=1)]


class _Warmup(BaseModel):
    """Base class of schedules with a warm-up."""

    model_config = ConfigDict(extra="forbid")

    # number of warm-up steps until the highest learning rate; values below 2 count as 2
    warmup_num_steps: _Steps = described(1000, _STEPS, 1000)
    # "log" increases with the logarithm of the step, "linear" with the step
    warmup_type: Literal["log", "linear"] = described("log", "is not available; use 'log' or 'linear'", "linear")

    @property
    def warmup(self) -> int:
        return max(2, self.warmup_num_steps)

    def risen(self, step: int) -> float:
        """Return the progress of the warm-up, 0 to 1, at one of its steps."""
        return math.log(step + 1) / math.log(self.warmup) if self.warmup_type == "log" else step / self.warmup

    def factor(self, step: int, base_lr: float) -> float:
        """Return the factor on the optimizer's learning rate at a step."""
        raise NotImplementedError


class WarmupLR(_Warmup):
    """Schedule from `warmup_min_lr` to `warmup_max_lr`, then constant; the optimizer's learning rate has no effect."""

    warmup_min_lr: _Lr = described(0.0, _LR, 0.0)
    warmup_max_lr: _Lr = described(0.001, _LR, 0.001)

    def factor(self, step: int, base_lr: float) -> float:
        """Return the factor on the optimizer's learning rate at a step."""
        share = self.risen(step) if step < self.warmup else self.share_behind(step)
        return (self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * share) / base_lr

    def share_behind(self, step: int) -> float:
        """Return the position between the lowest (0) and the highest (1) learning rate after the warm-up."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Schedule that warms up as `WarmupLR`, then decays linearly to `warmup_min_lr` at `total_num_steps`."""

    total_num_steps: _Steps = described(..., _STEPS, 10000)

    def share_behind(self, step: int) -> float:
        """Return the position between the lowest (0) and the highest (1) learning rate after the warm-up."""
        return max(0.0, (self.total_num_steps - step) / max(1.0, self.total_num_steps - self.warmup))


class WarmupCosineLR(_Warmup):
    """Schedule of learning-rate factors: warm-up from `warmup_min_ratio` to 1, then a cosine to `cos_min_ratio`."""

    total_num_steps: _Steps = described(..., _STEPS, 10000)
    warmup_min_ratio: _Ratio = described(0.0, _RATIO, 0.0)
    cos_min_ratio: _Ratio = described(0.0001, _RATIO, 0.0001)

    def factor(self, step: int, base_lr: float) -> float:
        """Return the factor on the optimizer's learning rate at a step."""
        if step < self.warmup:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self.risen(step)
        done = (step - self.warmup + 1) / max(1, self.total_num_steps - self.warmup)
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)


_KINDS: dict[str, type[_Warmup]] = {kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR)}
_SCHEDULE_NAMES = "WarmupLR, WarmupDecayLR or WarmupCosineLR"


class SchedulerBlock(BaseModel):
    """Block `scheduler`, such as `{"type": "WarmupLR", "params": {"warmup_num_steps": 100}}`."""

    model_config = ConfigDict(extra="forbid")

    type: StrictStr = described(..., f"is no name of a schedule; use {_SCHEDULE_NAMES}", "WarmupLR")
    params: dict[str, Any] = described({}, "is no object; use {'warmup_num_steps': 100}", {"warmup_num_steps": 100})

    def problems(self) -> list[str]:
        """Return what is wrong with the block, one sentence for each problem."""
        if self.type not in _KINDS:
            return [f"scheduler.type={self.type!r} is not available; use {_SCHEDULE_NAMES}"]
        try:
            _ = self.kind
        except ValidationError as error:
            return sentences(error, _KINDS[self.type], "scheduler.params.")
        return []

    @property
    def kind(self) -> _Warmup:
        """The schedule that the block describes; raises ValidationError if the parameters do not fit the schedule."""
        return _KINDS[self.type](**self.params)

    def build(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """Build the schedule of an optimizer that has not stepped, with a learning rate above 0."""
        check_lr(optimizer)
        kind = self.kind

        def of_group(base_lr: float) -> Callable[[int], float]:
            return lambda step: kind.factor(step, base_lr)

        return LambdaLR(optimizer, [of_group(float(group["lr"])) for group in optimizer.param_groups])


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
    """DeepSpeed's configuration. Omitted keys have DeepSpeed's defaults."""

    model_config = ConfigDict(extra="forbid")

    train_batch_size: _Count | None = described(None, _COUNT, 32)  # samples of a step, over all replicas
    # samples of a micro-batch of one replica
    train_micro_batch_size_per_gpu: _Count | None = described(None, _COUNT, 4)
    gradient_accumulation_steps: _Count | None = described(None, _COUNT, 8)  # micro-batches of a step
    # maximum global gradient norm; 0 for no clipping
    gradient_clipping: Annotated[StrictFloat, Field(ge=0)] = described(
        0.0, "is not a number of 0 or more; use one such as 1.0", 1.0
    )
    # fp16, bf16, zero_optimization, optimizer, scheduler: see their classes
    fp16: Fp16 = described(Fp16(), "is no object; use {'enabled': true}", {"enabled": True})
    bf16: Bf16 = described(Bf16(), "is no object; use {'enabled': true}", {"enabled": True})
    zero_optimization: Zero = described(Zero(), "is no object; use {'stage': 1}", {"stage": 1})
    optimizer: OptimizerBlock | None = described(None, "is no object; use {'type': 'AdamW'}", {"type": "AdamW"})
    scheduler: SchedulerBlock | None = described(None, "is no object; use {'type': 'WarmupLR'}", {"type": "WarmupLR"})
    # steps_per_print, wall_clock_breakdown: control DeepSpeed's output; accepted and ignored
    steps_per_print: StrictInt | None = described(None, "is not an integer; use one such as 10", 10)
    wall_clock_breakdown: StrictBool | None = described(None, _SWITCH, False)

    def options(self, dp_size: int) -> dict[str, Any]:
        """Convert to options of `HybridParallelPlugin`; refuses batch sizes that do not fit the replicas."""
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
        """Return a micro-batch's samples and a step's micro-batches, or None; refuses what does not fit."""
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
    """Read a configuration from a dict or a JSON file; raises ConfigurationError, a sentence a problem."""
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


@dataclass
class DeepSpeed3DParallelConfig:
    """Configuration with the fields of ATorch's class of this name; see `HybridParallelPlugin.from_3d_config`.

    Attributes:
        tpinfo: which modules are sharded; None, or one without rules, selects the policy of the model's family.
        custom_patcher: path of a module or the end of a path -> `patch(forward, module)`, which returns its new
            forward.
        tie_first: give a bare base model a head that is tied to its input embedding. A model with a head keeps it.
        logit_helper: `logit_helper(hidden, embedding)` computes the logits of that head; None for the family's own.
        ds_config: DeepSpeed's configuration, a dict or the path of a JSON file; None for the plugin's defaults.
        batch_fn: converts what a loader yields to ((inputs...), (labels...)); None if the loader yields that form or
            mappings.

    Raises:
        ConfigurationError: a field is invalid, or fields contradict each other.
    """

    base_seed: int = 1234
    tpinfo: TPInfo | None = None
    custom_patcher: Mapping[str, Patch] | None = None
    tie_first: bool = True
    logit_helper: LogitHelper | None = None
    ds_config: str | Path | Mapping[str, Any] | None = None
    batch_fn: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        problems = []
        if isinstance(self.base_seed, bool) or not isinstance(self.base_seed, int) or self.base_seed < 0:
            problems.append(f"base_seed={self.base_seed!r} is not an integer of 0 or more; use one such as 1234")
        if self.tpinfo is not None and not isinstance(self.tpinfo, TPInfo):
            problems.append(f"tpinfo is a {type(self.tpinfo).__name__}; use shardformer.TPInfo()")
        if not _is_patcher(self.custom_patcher):
            problems.append(
                f"custom_patcher={self.custom_patcher!r} is no mapping of paths to functions; use {{'h.*': patch}}"
            )
        for name in ("logit_helper", "batch_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                problems.append(f"{name}={value!r} is no function; use one, or None")
        if self.logit_helper is not None and not self.tie_first:
            problems.append("logit_helper computes logits of a tied embedding, and tie_first=False ties none; use True")
        if problems:
            raise ConfigurationError("; ".join(problems))
        _ = self.deepspeed  # validate `ds_config` here

    @cached_property
    def deepspeed(self) -> DeepSpeedConfig | None:
        """The parsed `ds_config`; None if there is none."""
        return None if self.ds_config is None else read_ds_config(self.ds_config)

    def options(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Convert the configuration to options of `HybridParallelPlugin`.

        Args:
            sizes: sizes of the groups "tensor", "data" and "pipeline"; a missing group has size 1.

        Raises:
            ConfigurationError: the batch sizes of `ds_config` are inconsistent with the number of data-parallel ranks.
        """
        dp_size = sizes.get("data", 1)
        options = {
            "tp_size": sizes.get("tensor", 1),
            "pp_size": sizes.get("pipeline", 1),
            "dp_size": dp_size,
            "seed": self.base_seed,
            "tp_info": self.tpinfo if self.tpinfo is not None and any(self.tpinfo.rules.values()) else None,
        }
        return options if self.deepspeed is None else {**options, **self.deepspeed.options(dp_size)}


def _is_patcher(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, Mapping) and all(isinstance(name, str) and callable(value[name]) for name in value)
