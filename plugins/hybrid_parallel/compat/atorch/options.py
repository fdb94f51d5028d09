"""What `auto_accelerate` takes beside the model, its data and its strategy."""

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
    """What else `auto_accelerate` takes.

    Attributes:
        optim_args, optim_param_func: `optim_func(optim_param_func(model), **optim_args)` is the optimizer.
        optimizer: in the place of `optim_func`; a class does as well.
        prepare_input: `prepare_input(batch, device)`; None moves tensors to the device.
        dataloader_args: of the `DataLoader`; `batch_size` is the **global** batch (default: 8 for each rank).
        lr_scheduler_cls, lr_scheduler_args: `lr_scheduler_cls(optimizer, **lr_scheduler_args)` is the schedule.
        device: that is planned for, a `Device` or the name of a preset; None measures this machine.
        precision: of training; None for "bf16" on GPUs and "fp32" on CPUs.
        sequence_length: tokens of a sample; None for those of the dataset's first.
        num_candidates: layouts that are tried.
        num_steps: steps that are timed of each.
        excluded: `excluded(options)` is true of layouts that are not wanted.
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
        """The options by name.

        Raises:
            ConfigurationError: there is no such option; names the nearest.
        """
        check_names(options, [each.name for each in fields(AccelerateOptions)], "auto_accelerate")
        return AccelerateOptions(**options)

    @property
    def global_batch(self) -> int:
        """Samples of a step, over all replicas."""
        return dict(self.dataloader_args or {}).get("batch_size") or 8 * dist.get_world_size()
