"""Build a torch learning-rate schedule from the block `scheduler` of DeepSpeed's configuration.

The formulas are DeepSpeed's. As in torch, step 0 is the first step of the optimizer. DeepSpeed's schedules start one
call later, so DeepSpeed has a step without a learning rate before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, ValidationError
from torch.optim.lr_scheduler import LambdaLR

from plugins.hybrid_parallel.compat.deepspeed_3d.optimizers import check_lr
from plugins.hybrid_parallel.compat.deepspeed_3d.pydantic_errors import described, sentences

_LR = "is not a number of 0 or more; use one such as 0.001"
_STEPS = "is not an integer of 0 or more; use one such as 1000"
_RATIO = "is not a share between 0 and 1; use one such as 0.0"
_Lr = Annotated[StrictFloat, Field(ge=0)]
_Steps = Annotated[StrictInt, Field(ge=0)]
_Ratio = Annotated[StrictFloat, Field(ge=0, le=1)]


class _Warmup(BaseModel):
    """Base class of schedules with a warm-up.

    Attributes:
        warmup_num_steps: number of warm-up steps until the highest learning rate; values below 2 count as 2.
        warmup_type: "log" increases with the logarithm of the step, "linear" with the step.
    """

    model_config = ConfigDict(extra="forbid")

    warmup_num_steps: _Steps = described(1000, _STEPS, 1000)
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
_NAMES = "WarmupLR, WarmupDecayLR or WarmupCosineLR"


class SchedulerBlock(BaseModel):
    """Block `scheduler`, such as `{"type": "WarmupLR", "params": {"warmup_num_steps": 100}}`."""

    model_config = ConfigDict(extra="forbid")

    type: StrictStr = described(..., f"is no name of a schedule; use {_NAMES}", "WarmupLR")
    params: dict[str, Any] = described({}, "is no object; use {'warmup_num_steps': 100}", {"warmup_num_steps": 100})

    def problems(self) -> list[str]:
        """Return what is wrong with the block, one sentence for each problem."""
        if self.type not in _KINDS:
            return [f"scheduler.type={self.type!r} is not available; use {_NAMES}"]
        try:
            _ = self.kind
        except ValidationError as error:
            return sentences(error, _KINDS[self.type], "scheduler.params.")
        return []

    @property
    def kind(self) -> _Warmup:
        """The schedule that the block describes.

        Raises:
            ValidationError: if the parameters do not fit the schedule.
        """
        return _KINDS[self.type](**self.params)

    def build(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """Build the schedule of an optimizer that has not taken a step yet.

        Raises:
            ConfigurationError: the optimizer's learning rate is 0.
        """
        check_lr(optimizer)
        kind = self.kind

        def of_group(base_lr: float) -> Callable[[int], float]:
            return lambda step: kind.factor(step, base_lr)

        return LambdaLR(optimizer, [of_group(float(group["lr"])) for group in optimizer.param_groups])
