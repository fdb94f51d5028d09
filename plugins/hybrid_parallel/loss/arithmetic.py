"""The arithmetic of the loss, from a micro-batch to the gradient that the user's optimizer reads.

The loss of a step is a mean over the global batch: a sum over the micro-batches of all replicas, divided once by the
count over all of them. Replicas are the data- and context-parallel ranks (`DP_CP`). In this order:

1. Share. A micro-batch's part of the loss: its sum / the global count (`share_of_sum`), or its mean * its samples / the
   samples of the global batch (`share_of_mean`); a model's own head divides each of its sums (`HeadLoss.weighted_sum`).
   Context-parallel ranks that compute the same share each take an equal part of it (`per_copy`).
2. Scale. The backward pass starts from the share times the loss scale, which is 1 except under fp16 (`scaled`).
3. Reduce. Gradients are summed over micro-batches and replicas (`zero/bucket.py`). Nothing is divided here: the shares
   are divided already.
4. Correct. If the criterion returned its own count, the shares were divided by the samples of the global batch. The
   reduced gradients are multiplied by samples / count (`count_factor`).
5. Unscale and clip. `optimizer.step` multiplies by 1 / the loss scale and by the clipping factor (`gradient_factor`).

`booster.execute_pipeline` takes these steps with each share. In an ordinary loop the loss is whatever the user
computed (`ReplicaLosses`). `booster.backward` differentiates the mean of the replicas' losses, because a loss of a
replica's own samples is a mean over these (`mean_over_replicas`, which also scales). The loss that the model returned
is the sum of all shares, and the same on every replica (`SumOverReplicas`). The mean of the replicas' losses thus
contains each share once: its gradient is the incoming one, 1 / replicas, times their number. The two factors cannot be
left out together, because one loss may have terms of both kinds. A (sum, count) is divided by the count of all
replicas; the loss that the model returned may then have another factor on each replica, and these are summed.

A model has one fp16 loss scale (Micikevicius et al., arXiv 1710.03740, section 3.2), which all of its optimizers share,
as they would share a `torch.amp.GradScaler`. Each optimizer skips its own step if its own gradients overflow. Once all
have stepped, the scale shrinks if any overflowed.

A loss of a script's own that is a plain tensor is a mean over the rows of a replica's share. `mean_over_replicas`
averages the replicas; each row then counts once if a replica counts by its rows. These weights are put on the gradients
of the model's outputs, so that a loss may have terms of another kind besides: the loss that the model returned, which
is one of all replicas, and terms of weights alone, which are the same on each. A pair (sum, count) is divided by the
count of all replicas instead, and needs no weights. Where passes accumulate, the count of the first call divides each
sum, and `Counts.factor` corrects the reduced gradients to that of all calls.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
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
from shardformer.distributed.process_groups import all_gather_json

# Of norms on a CPU: values of a block, blocks from which on their rounding errors cancel, how many blocks are between
# those that are looked at, the relative error that these may have together, and values that are copied at once.
_BLOCK, _FEWEST_BLOCKS, _EVERY, _TOLERANCE, _AT_ONCE = 128, 4096, 61, 3e-8, 2**18


def share_of_sum(total: Tensor, global_count: Tensor) -> Tensor:
    """Return the share of a micro-batch whose losses sum to `total` (0-d); a count below 1 is taken as 1."""
    return total / global_count.clamp(min=1.0).to(total.dtype)


def share_of_mean(mean: Tensor, rows: int, global_rows: Tensor) -> Tensor:
    """Return the share of a micro-batch of `rows` samples whose mean loss is `mean` (0-d)."""
    return mean * (rows / global_rows.clamp(min=1.0)).to(mean.dtype)


def per_copy(value: Any, copies: int) -> Any:
    """Return the part of `value`, a number or tensor, that each of `copies` ranks with the same value contributes."""
    return value if copies == 1 else value / copies


class SumOverReplicas(torch.autograd.Function):
    """Sums shares over replicas, to the loss that all of them return (0-d).

    The derivative is that of the mean over replicas of these losses, which `mean_over_replicas` differentiates, or of
    the sum over replicas where the script's loss is a (sum, count).
    """

    @staticmethod
    def forward(
        ctx: Any, share: Tensor, group: dist.ProcessGroup, is_summed: bool = False, losses: ReplicaLosses | None = None
    ) -> Tensor:
        """Sum the shares, 0-d, over the ranks of the group; `is_summed` tells that each rank has the sum already."""
        ctx.group, ctx.losses = group, losses
        total = share.clone()
        if not is_summed:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Multiply the gradient, so that the mean over the ranks is the gradient of the sum, or sum it."""
        if ctx.losses is None or ctx.losses.kind is not LossKind.SUM:
            return grad * dist.get_world_size(ctx.group), None, None, None
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None, None, None


def exact_sum(values: Iterable[float], group: dist.ProcessGroup) -> float:
    """Return the sum of the values of all ranks of `group`, rounded once, so that their order does not matter."""
    everyone = all_gather_json([float(value) for value in values], group)
    together = [value for of_rank in everyone for value in of_rank]
    return math.fsum(together) if all(map(math.isfinite, together)) else sum(together)


def scaled(share: Tensor, scale: float) -> Tensor:
    """Return `share` times the loss scale."""
    return share if scale == 1.0 else share * scale


def share_of_counted(total: Tensor, divisor: Tensor, scale: float) -> Tensor:
    """Return this replica's sum / `divisor` (0-d) times the loss scale; one factor, as the scale exceeds fp16."""
    total = total.to(torch.promote_types(total.dtype, torch.float32))
    return total * (scale / divisor).to(total)


def mean_over_replicas(loss: Tensor, num_replicas: int, scale: float) -> Tensor:
    """Return this replica's term of the mean of the replicas' losses, times the loss scale."""
    return loss * (scale / num_replicas)


def count_factor(rows: Tensor, count: Tensor, is_counted: Tensor) -> Tensor:
    """Return the factor on shares that were divided by `rows` and belong to the global count `count` (0-d, float64).

    Args:
        rows: samples of the global batch, 0-d.
        count: sum of the counts that the criterion returned, 0-d; if it is 0, so is the factor.
        is_counted: above 0 if the criterion returned counts; otherwise the factor is 1.
    """
    by_count = rows / count.clamp(min=torch.finfo(count.dtype).tiny)
    return torch.where(is_counted > 0, torch.where(count > 0, by_count, 0.0), 1.0)


def unscaled(value: Tensor, scale: float) -> Tensor:
    """Return a gradient, or a norm of gradients, that is held at `scale`, at scale 1."""
    return value if scale == 1.0 else value / scale


def norm_of(values: Tensor, norm_type: float = 2.0) -> Tensor:
    """Return the norm of a flat tensor, [n], with a relative error below 1e-7 (0-d, float64).

    A GPU adds up in float64. On a CPU torch adds up fp32 values in fp32, one after the other: 1e8 values lose 1 % of
    their norm. To add up in float64 takes four times as long. So blocks are added up in fp32, and their norms in
    float64: the rounding errors of blocks cancel, unless all blocks are the same. Some blocks are added up both ways to
    see that.

    Args:
        norm_type: the `p` of the p-norm, above 0; `inf` for the largest absolute value.
    """
    if values.device.type != "cpu":
        return torch._foreach_norm([values], norm_type, torch.float64)[0]
    blocks = values[: values.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK)
    if values.dtype == torch.float32 and len(blocks) >= _FEWEST_BLOCKS:
        rest = values[blocks.numel() :]
        quick = _in_float64([_norms_of_rows(blocks, norm_type), _norms_of_rows(rest[None], norm_type)], norm_type)
        seen = blocks[::_EVERY]
        found, exact = (_in_float64([part], norm_type) for part in (_norms_of_rows(seen, norm_type), seen.flatten()))
        if math.isfinite(quick) and math.isclose(found, exact, rel_tol=_TOLERANCE):
            return quick
    return _in_float64(values.split(_AT_ONCE) or [values], norm_type)


def _norms_of_rows(rows: Tensor, norm_type: float) -> Tensor:
    return torch.linalg.vector_norm(rows, norm_type, dim=1)


def _in_float64(parts: Iterable[Tensor], norm_type: float) -> Tensor:
    norms = [torch.linalg.vector_norm(part, norm_type, dtype=torch.float64) for part in parts]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor (0-d) that brings gradients of norm `norm` to at most `max_norm`, as torch computes it."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def gradient_factor(scale: float, norm: Tensor | None, max_norm: float | None) -> Tensor | float | None:
    """Return the factor that unscales and clips gradients before the update; None for no change.

    Args:
        scale: the scale that the gradients are held at.
        norm: their global norm at scale 1, 0-d; read only for clipping.
        max_norm: upper limit for the norm; None for no clipping.
    """
    unscale = None if scale == 1.0 else 1.0 / scale
    if max_norm is None:
        return unscale
    clip = clip_factor(norm, max_norm)
    return clip if unscale is None else clip * unscale


_FLOOR = 1.0  # no scaling: gradients that overflow at this scale overflow by themselves


class LossScale:
    """Constant scale of 1, for fp32 and bf16."""

    value = 1.0
    watches_overflow = False
    can_shrink = False

    def record(self, overflowed: bool) -> None:
        """Record whether one optimizer's step overflowed."""

    def update(self) -> None:
        """Choose the next scale, after all optimizers with gradients have stepped; do nothing if none has stepped."""

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint saves of the scale; nothing for a constant one."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load a saved scale."""


class DynamicLossScale(LossScale):
    """Scale that halves on an overflow and doubles after `growth_interval` steps without one.

    Args:
        initial_scale: the scale of the first step.
        growth_interval: steps without overflow before the scale doubles.
    """

    watches_overflow = True

    def __init__(self, initial_scale: float, growth_interval: int) -> None:
        self.value, self.growth_interval = float(initial_scale), growth_interval
        self.good_steps = 0
        self._overflowed: bool | None = None  # whether a step since the last update overflowed; None without steps

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow may come from the scale; at its floor it does not."""
        return self.value > _FLOOR

    def record(self, overflowed: bool) -> None:
        """Record whether one optimizer's step overflowed."""
        self._overflowed = overflowed or bool(self._overflowed)

    def update(self) -> None:
        """Choose the next scale, after all optimizers with gradients have stepped; do nothing if none has stepped."""
        overflowed, self._overflowed = self._overflowed, None
        if overflowed is None:
            return
        if overflowed:
            self.value, self.good_steps = max(self.value / 2, _FLOOR), 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            doubled = self.value * 2
            self.value, self.good_steps = (doubled if math.isfinite(doubled) else self.value), 0

    def state_dict(self) -> dict[str, float]:
        """Return the scale and the number of good steps, for a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load a saved scale; keep the present one if the checkpoint has none."""
        if state:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])


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
        """Exchange a batch's `rows`, None if unknown, at an optimizer's `step`; None if there is one replica."""
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
    if not rest and value.numel() != 1:
        raise ConfigurationError(
            f"booster.backward got {_described(value)} for the loss; give one number, as loss.mean() or (sum, count)"
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
