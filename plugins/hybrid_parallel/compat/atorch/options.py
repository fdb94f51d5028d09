"""Options of `auto_accelerate` other than the model, its data and its strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.errors import check_names
from plugins.hybrid_parallel.planner.device import Device


@dataclass(kw_only=True)
class AccelerateOptions:
    """Further options of `auto_accelerate`.

    Attributes:
        optim_args, optim_param_func: the optimizer is `optim_func(optim_param_func(model), **optim_args)`.
        optimizer: an optimizer, or its class, instead of `optim_func`.
        prepare_input: called as `prepare_input(batch, device)`; None moves tensors to the device.
        dataloader_args: arguments of the `DataLoader`; `batch_size` is the **global** batch (default: 8 per rank).
        lr_scheduler_cls, lr_scheduler_args: the schedule is `lr_scheduler_cls(optimizer, **lr_scheduler_args)`.
        device: device to plan for, a `Device` or the name of a preset; None measures this machine.
        precision: training precision; None for "bf16" on GPUs and "fp32" on CPUs.
        sequence_length: tokens of a sample; None for the length of the dataset's first sample.
        num_candidates: number of layouts that are tried.
        num_steps: number of timed steps per layout.
        excluded: layouts for which `excluded(options)` is true are skipped.
    """

    optim_args: Mapping[str, Any] | None = None
    optim_param_func: Callable[[nn.Module], Any] | None = None
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None
    prepare_input: Callable[[Any, torch.device], Any] | None = None
    dataloader_args: Mapping[str, Any] | None = None
    lr_scheduler_cls: Callable[..., Any] | None = None
    lr_scheduler_args: Mapping[str, Any] | None = None
    device: str | Device | None = None
    precision: str | None = None
    sequence_length: int | None = None
    num_candidates: int = 3
    num_steps: int = 3
    excluded: Callable[[Mapping[str, Any]], bool] | None = None

    @staticmethod
    def of(options: Mapping[str, Any]) -> AccelerateOptions:
        """Create the options from a mapping of names to values.

        Raises:
            ConfigurationError: there is no such option; the message suggests the nearest name.
        """
        check_names(options, [each.name for each in fields(AccelerateOptions)], "auto_accelerate")
        return AccelerateOptions(**options)

    @property
    def global_batch(self) -> int:
        """Samples of a step, over all replicas."""
        return dict(self.dataloader_args or {}).get("batch_size") or 8 * dist.get_world_size()
