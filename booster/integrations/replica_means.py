"""Means over the samples of each replica, whose mean is that over the samples of all replicas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ReplicaMeans(Tensor):
    """One value of each replica, [replicas]: a mean over its samples, or a sum.

    `mean()` is that over all samples, also where replicas have different numbers of them, or none. Everything else is
    as for plain tensors, and returns plain tensors.

    Attributes:
        rows: number of samples of each replica, [replicas].
    """

    rows: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(values: Tensor, rows: Tensor) -> ReplicaMeans:
        """Return `values` of replicas with so many samples."""
        means = values.as_subclass(ReplicaMeans)
        means.rows = rows
        return means

    def mean(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean over the samples of all replicas (0-d)."""
        values = self.as_subclass(Tensor)
        if args or kwargs or not int(self.rows.sum()):
            return values.mean(*args, **kwargs)
        shares = (self.rows / self.rows.sum()).to(values.dtype)
        return (values.where(self.rows > 0, 0) * shares).sum()  # the mean over no samples is nan
