"""Losses that scripts compute themselves: how those of replicas, and of accumulated passes, become one.

A plain tensor is a mean over the rows of a replica's share. `mean_over_replicas` averages the replicas; each row then
counts once if a replica counts by its rows. These weights are put on the gradients of the model's outputs, so that a
loss may have terms of another kind besides: the loss that the model returned, which is one of all replicas, and terms
of weights alone, which are the same on each.

A pair (sum, count) is divided by the count of all replicas instead, and needs no weights. Where passes accumulate, the
count of the first call divides each sum, and `Counts.factor` corrects the reduced gradients to that of all calls.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from booster.data.rows import unknown_rows
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh

_LOSS = "loss"  # the output that is the loss of all replicas


class LossKind(Enum):
    """What the losses of replicas are."""

    MEAN_OF_ROWS = "a mean over rows"
    MEAN_OF_REPLICAS = "a value whose mean over replicas is the loss"
    SUM = "a sum, divided by the count of all replicas"


class ReplicaLosses:
    """How the losses of one model's replicas are put together.

    Attributes:
        kind: what the loss of the backward pass under way is; outside of `booster.backward` nothing is weighted.
    """

    def __init__(self, mesh: HybridMesh) -> None:
        self.mesh, self.kind = mesh, LossKind.MEAN_OF_REPLICAS

    @contextmanager
    def of(self, kind: LossKind) -> Iterator[None]:
        """Take the losses of backward passes in this context for this kind."""
        self.kind, before = kind, self.kind
        try:
            yield
        finally:
            self.kind = before

    def begin(self, rows: int | None, step: int) -> RowWeight | None:
        """Exchange the rows of a batch that the model is called with; None if there is one replica.

        Args:
            rows: samples of this replica's share; None if they are not known.
            step: number of the optimizer's step.
        """
        return RowWeight(self, rows, step) if self.mesh.size("dp") > 1 else None

    def weigh(self, gradient: Tensor, weight: float) -> Tensor:
        """Return a multiple of the gradient of a mean over rows, and of other losses the gradient as it is."""
        if self.kind is not LossKind.MEAN_OF_ROWS:
            return gradient
        if math.isnan(weight):
            raise unknown_rows()
        return gradient * weight


class RowWeight:
    """Rows of a replica's share of a batch, as a multiple of the mean over replicas.

    They are exchanged while the forward pass runs.

    Args:
        losses: tells what the loss is, when gradients arrive.
        rows: samples of this replica's share; None if they are not known.
        step: number of the optimizer's step, which replicas that have called the model equally often share.
    """

    def __init__(self, losses: ReplicaLosses, rows: int | None, step: int) -> None:
        self.losses, self._mine = losses, (rows or 0, step)
        # On the CPU: reading the result must not wait for the device.
        self._sums = torch.tensor([rows or 0, step, rows is None])
        self._work = dist.all_reduce(self._sums, group=losses.mesh.group("dp"), async_op=True)

    def wait(self) -> float:
        """Return the weight; nan if a replica does not know its rows."""
        self._work.wait()
        (rows, step), replicas = self._mine, self.losses.mesh.size("dp")
        total, steps, unknown = self._sums.tolist()
        if steps != replicas * step:
            raise ConfigurationError(
                f"a replica calls model(**batch) after {step} steps of the optimizer, and another one after "
                "another number; all replicas call the model equally often, or under torch.no_grad()"
            )
        if unknown:
            return math.nan
        return rows * replicas / total if total else 1.0

    def on_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient that an output gets of this replica's loss as the gradient of its share of the loss."""
        weight = self.wait()
        return gradient if weight == 1.0 else self.losses.weigh(gradient, weight)

    def on_outputs(self, outputs: Any) -> Any:
        """Return outputs with the weight on their gradients; the loss of all replicas among them needs none."""
        weight = self.wait()
        return outputs if weight == 1.0 else _weighed(outputs, weight, self.losses)


def off_inputs(inputs: Any) -> Any:
    """Return inputs without the weights of the models that they are outputs of: those of the last model count."""
    for tensor in _tensors(inputs):
        for node in nodes_of(tensor) if tensor.requires_grad else ():
            if node.name() == f"{_Weighed.__name__}Backward":
                return _weighed(inputs, 1.0 / node.weight, node.losses) if node.weight else inputs
    return inputs


def nodes_of(tensor: Tensor) -> Iterator[Node]:
    """Yield the nodes of the script's own computation of a tensor, and of models up to functions in Python."""
    waiting: list[Node | None] = [tensor.grad_fn]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not isinstance(node, BackwardCFunction):
            waiting += [following for following, _ in node.next_functions]


class Counts:
    """Counts of losses (sum, count) whose gradients add up before they are reduced.

    Args:
        first: count of the first loss, over all replicas, 0-d, float64.

    Attributes:
        divisor: what each of the sums is divided by, 0-d.
    """

    def __init__(self, first: Tensor) -> None:
        self.divisor = torch.where(first > 0, first, 1.0)
        self._counts = [first]

    def add(self, count: Tensor) -> None:
        """Add the count of another loss, over all replicas."""
        self._counts.append(count)

    def factor(self) -> Tensor | None:
        """Return the factor (0-d) that corrects the gradients to the sum of all counts; None for no change."""
        if len(self._counts) == 1:
            return None
        total = torch.stack(self._counts).sum()
        return torch.where(total > 0, self.divisor / torch.where(total > 0, total, 1.0), 0.0)


def loss_and_count(loss: Any) -> tuple[Tensor, Any]:
    """Return the tensor of a loss and its count, which is None for a mean."""
    value, *rest = loss if isinstance(loss, tuple | list) else (loss,)
    if not isinstance(value, Tensor) or len(rest) > 1:
        raise ConfigurationError(
            f"booster.backward got a {type(loss).__name__} for the loss, as a model returns without labels in the "
            "batch; give it labels, or compute a mean or (sum, count) from its outputs"
        )
    if not value.requires_grad:
        raise ConfigurationError(
            "booster.backward got a loss without a graph, as execute_pipeline returns it after the backward pass, and "
            "torch.no_grad() leaves it; call optimizer.step(), or compute the loss from model(**batch) outside of that"
        )
    count = rest[0] if rest else None
    is_number = isinstance(count, int | float) or (isinstance(count, Tensor) and count.numel() == 1)
    if rest and not is_number:
        raise ConfigurationError(
            f"booster.backward got (sum, count) whose count is {_described(count)}; give the number of what was summed"
        )
    if rest and value.dim():
        raise ConfigurationError(
            f"booster.backward got (sum, count) whose sum is {_described(value)}; give a 0-d tensor, as "
            "cross_entropy(..., reduction='sum') returns it"
        )
    return value, count


def over_replicas(count: Any, mesh: HybridMesh) -> Tensor:
    """Return the sum of the counts of all data- and context-parallel ranks, 0-d, float64."""
    given = count.detach().reshape(()) if isinstance(count, Tensor) else torch.tensor(count)
    total = given.to(device=mesh.device, dtype=torch.float64, copy=True)
    if mesh.size(DP_CP) > 1:
        dist.all_reduce(total, group=mesh.group(DP_CP))
    return total


class _Weighed(torch.autograd.Function):
    """Passes a tensor on, and a multiple of its gradient back if the loss is a mean over rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: float, losses: ReplicaLosses) -> Tensor:
        """Return the tensor as one of its own, on which other results do not depend."""
        ctx.weight, ctx.losses = weight, losses
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the multiple."""
        return ctx.losses.weigh(grad, ctx.weight), None, None


def _weighed(data: Any, weight: float, losses: ReplicaLosses) -> Any:
    """Return nested tensors with a weight on their gradients."""
    if isinstance(data, Tensor):
        return _Weighed.apply(data, weight, losses) if data.requires_grad else data
    if isinstance(data, Mapping):
        made = {name: value if name == _LOSS else _weighed(value, weight, losses) for name, value in data.items()}
        return type(data)(**made) if is_dataclass(data) else type(data)(made)
    if isinstance(data, tuple | list):
        values = [_weighed(value, weight, losses) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
    if is_dataclass(data) and not isinstance(data, type):
        made = copy.copy(data)
        made.__dict__.update({name: _weighed(value, weight, losses) for name, value in vars(data).items()})
        return made
    return data


def _tensors(data: Any) -> Iterator[Tensor]:
    if isinstance(data, Tensor):
        yield data
    for each in data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple | list) else ():
        yield from _tensors(each)


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
