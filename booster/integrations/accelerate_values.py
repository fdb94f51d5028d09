"""The part of `Accelerator` that joins and splits values over data-parallel replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from torch import Tensor

from booster.integrations.replicas import Replicas, holds_tensors, map_tensors
from shardformer.distributed.process_groups import world_group


class ReplicaValues:
    """Mixin before accelerate's `Accelerator`.

    Attributes:
        replicas: the data-parallel replicas.
        losses_by_rows: whether replicas count by the rows of their shares in means of the script's own. They do not in
            a loss that is made of sums over all replicas: one that `reduce` has added up, or that the script multiplies
            by `num_processes`, which it reads after its model's call.
    """

    losses_by_rows = True
    replicas: Replicas
    gradient_state: Any
    device: torch.device
    flag_tensor: Tensor | None

    def gather(self, tensor: Any) -> Any:
        """Return tensors of all replicas, joined along dim 0."""
        return self.replicas.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return values of all replicas: each sample once, in the order of the dataset."""
        is_short = self.gradient_state.end_of_dataloader and self.gradient_state.remainder > 0
        # What has a row for each sample is as long as that already; accelerate cuts other rows too.
        rows = self.gradient_state.remainder if is_short else None
        if use_gather_object or not holds_tensors(input_data):
            return self.replicas.gather_objects(input_data)[:rows]

        def gathered(tensor: Tensor) -> Tensor:
            found = self.replicas.gather(tensor)
            return found[:rows] if found.dim() else found

        return map_tensors(gathered, input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return tensors combined over replicas: "sum", "mean", "max" or "none"; `scale` is for TPUs, as accelerate's.

        Raises:
            ConfigurationError: for another reduction.
        """
        if reduction == "sum" and getattr(tensor, "requires_grad", False):
            self.losses_by_rows = False
        return self.replicas.reduce(tensor, reduction)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this replica's part of a list, tuple, tensor, dict or dataset."""
        place = SimpleNamespace(num_processes=self.num_processes, process_index=self.process_index, device=self.device)
        with PartialState.split_between_processes(place, inputs, apply_padding) as part:
            yield part

    def check_trigger(self) -> bool:
        """Return whether any rank has called `set_trigger` since the last check; all ranks call it."""
        flag = torch.tensor(0 if self.flag_tensor is None else int(self.flag_tensor))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=world_group())
        if flag:
            self.flag_tensor = None
        return bool(flag)
