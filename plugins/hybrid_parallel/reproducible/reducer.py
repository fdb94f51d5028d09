"""ExactReducer: sums of gradients that are the same bits in any order.

Floating-point addition rounds, so that a sum depends on who adds what first. Here each summand is first rounded to a
multiple of a fixed grid (pre-rounding: Demmel and Nguyen, "Fast reproducible floating-point summation", 2013; Ahrens,
Demmel and Nguyen, "Algorithms for efficient reproducible floating point summation", 2020). The multiples are added as
int64, which is exact in any order; the sum is rounded to floating point once, when it is complete.

An fp32 value of 2**-26 (1.5e-8) or more is a multiple of the grid already. Smaller ones lose what is below 2**-50
(8.9e-16), far below the `eps` that an optimizer adds. The absolute values of all summands of an element must add up to
less than `LIMIT`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.reducer import GradientReducer
from shardformer.distributed.process_groups import world_group

_STEPS = 2.0**50  # multiples of the grid in 1
LIMIT = 2.0**13  # 2**63 / _STEPS
# A square, or a lower power, is split into multiples of 2**-4, 2**-34 and 2**-64: each part has at most 31 bits, so
# that 2**32 of them add up in int64. What a sum has beyond 30 bits is carried to the part before, so that it adds up
# with those of all other parameters and ranks.
_FIRST_BITS, _PART_BITS, NUM_PARTS = 4, 30, 3
_CHUNK = 1 << 16  # elements that a CPU converts at once: their intermediate values stay in its cache


def largest(values: Tensor) -> Tensor:
    """Return the largest absolute value (0-d); nan if one is nan."""
    if not values.numel():
        return values.new_zeros(())
    least, most = values.aminmax()  # on a CPU much faster than a norm
    return torch.maximum(-least, most)


def add_multiples(sums: Tensor, values: Tensor, begin: bool) -> float:
    """Add floating-point values, rounded towards zero to multiples of the grid, to `sums`; for |values| < `LIMIT`.

    Args:
        sums: multiples of the same shape, contiguous int64.
        begin: `sums` has no content yet, and is overwritten.

    Returns:
        The largest absolute value; nan if one is nan.
    """
    bound, size = 0.0, _chunk_of(values)
    for total, part in zip(sums.view(-1).split(size), values.reshape(-1).split(size), strict=True):
        most = largest(part).item()
        bound = most if most != most else max(bound, most)
        if not most:  # most rows of an embedding
            if begin:
                total.zero_()
            continue
        multiples = part.mul(_STEPS).to(torch.int64)  # the product is exact: it only changes exponents
        if begin:
            total.copy_(multiples)
        else:
            total.add_(multiples)
    return bound


def from_multiples(multiples: Tensor, dtype: torch.dtype) -> Tensor:
    """Return int64 multiples of the grid, [n], as floating-point values."""
    values = multiples.new_empty(multiples.shape, dtype=dtype)
    size = _chunk_of(values)
    for part, into in zip(multiples.split(size), values.split(size), strict=True):
        into.copy_(part.to(torch.float64).mul_(1.0 / _STEPS))
    return values


def power_parts(values: Tensor, exponent: float) -> Tensor:
    """Return the sum of powers (at most 2) of |fp32 `values`|, [n], in parts that add up exactly, [3] int64."""
    zero = torch.zeros(NUM_PARTS, dtype=torch.int64, device=values.device)
    parts = sum((_power_parts(part, exponent) for part in values.split(_chunk_of(values))), zero)
    for place in range(NUM_PARTS - 1, 0, -1):
        parts[place - 1] += parts[place] >> _PART_BITS
        parts[place] &= (1 << _PART_BITS) - 1
    return parts


def _chunk_of(values: Tensor) -> int:
    """Return how many elements to convert at once."""
    return _CHUNK if values.device.type == "cpu" else max(1, values.numel())


def _power_parts(values: Tensor, exponent: float) -> Tensor:
    rest = values.to(torch.float64).abs_().pow_(exponent).mul_(2.0**_FIRST_BITS)
    parts = []
    for _ in range(NUM_PARTS):
        whole = rest.floor()
        parts.append(whole.to(torch.int64).sum())
        rest.sub_(whole).mul_(2.0**_PART_BITS)
    return torch.stack(parts)


def norm_of_parts(parts: Iterable[int], exponent: float) -> float:
    """Return the root of a sum of powers from its three parts."""
    total = 0
    for part in parts:
        total = (total << _PART_BITS) + part
    whole = math.ldexp(total, -_FIRST_BITS - _PART_BITS * (NUM_PARTS - 1))
    return math.sqrt(whole) if exponent == 2.0 else whole ** (1.0 / exponent)


class ExactBucket(Bucket):
    """Bucket that sums int64 multiples of a fixed grid over units, ranks and steps of accumulation.

    From `complete` on, the gradients are floating-point values as in any bucket. The multiples are kept, so that a
    further pass adds to the exact sum; if user code has changed the values since, it adds to these instead.

    Attributes:
        bound: sum of the largest absolute values of all local gradients since the last reduction, 0-d float64; not
            finite if one is not. `ExactReducer` adds it up over ranks before `complete`.
    """

    sum_dtype = torch.int64

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bound = torch.zeros((), dtype=torch.float64, device=self.flat.device)
        self._reduced: Tensor | None = None  # multiples of `_result`, [shard]; None if these are not its exact values
        self._kept: Tensor | None = None  # multiples of `shard_grads`
        self._versions_of: dict[str, int] = {}  # of the values that were made from multiples

    def accumulate(self, index: int, grad: Tensor, stays: bool = False) -> None:
        """Add a local gradient to the bucket."""
        if self.launched:
            raise RuntimeError("a gradient arrived after its bucket was reduced; run the backward pass once a step")
        self._provide_flat_grads()
        self.bound += add_multiples(self._grad_view(index), grad, begin=index not in self.written)
        self.written.add(index)

    def borrow_grad_view(self, index: int) -> None:
        """Lend no slot: a product would write values that are not rounded to the grid."""
        return None

    def collect(self) -> None:
        """Wait for the result of the reduction."""
        if self._work is not None:
            self._work.wait()
        if self._pending is not None and self._result is None:
            self._result = self._pending.wait()
            self._pending.mark_done(True)

    def complete(self, factor: Tensor | None) -> None:
        """Complete the reduction, and round the sum to floating point; see `Bucket.complete`."""
        self.collect()
        self.release_local_grads()
        multiples = self._result
        if self._sum_of_passes is not None:
            multiples = self._sum_of_passes if multiples is None else multiples.add_(self._sum_of_passes)
            self._sum_of_passes = None
        for group in self.sum_groups:
            dist.all_reduce(multiples, group=group)
        if multiples is self.flat_grads:
            self.flat_grads = None
        self._result, self._reduced = from_multiples(multiples, self.grad_dtype), multiples
        if not self.bound.isfinite():
            self._result.fill_(torch.nan)
            self._reduced = None
        self.bound.zero_()
        if factor is not None and float(factor) != 1.0:
            self._result.mul_(factor.to(self._result.dtype))
            self._reduced = None
        self._versions_of["reduced"] = self._result._version

    def keep(self, used: set[int]) -> None:
        """Add the result of the reduction to the shard; see `Bucket.keep`."""
        self.clear_stale()
        is_exact = self._reduced is not None and self._result._version == self._versions_of["reduced"]
        reduced = self._reduced if is_exact else None
        if not self.used:
            self.shard_grads, self._kept = self._result, reduced
        elif reduced is not None and self._kept_is_exact():
            self._kept.add_(reduced)
            self.shard_grads.copy_(from_multiples(self._kept, self.grad_dtype))
        else:
            self.shard_grads.add_(self._result)
            self._kept = None
        self._versions_of["kept"] = self.shard_grads._version
        self._stale.clear()
        self.used |= used
        self.adds = False
        self.written.clear()
        self.in_passes.clear()
        self.norm = self._work = self._result = self._reduced = None
        self.launched = False

    def _kept_is_exact(self) -> bool:
        return self._kept is not None and self.shard_grads._version == self._versions_of["kept"]

    def _provide_flat_grads(self) -> None:
        if self.flat_grads is None and not self.used and self.options.num_shards == 1:
            self.flat_grads, self._kept = self._kept, None  # the memory of the last step, whose gradients were cleared
        super()._provide_flat_grads()


class ExactReducer(GradientReducer):
    """Reducer that refuses sums beyond the range of the grid, and computes the global norm exactly."""

    buckets: list[ExactBucket]

    def finish(self, factor: Tensor | None = None) -> None:
        """Reduce the remaining buckets; refuses, on all ranks, gradients too large for exact sums."""
        self.launch_rest()
        bounds = torch.stack([bucket.bound for bucket in self.buckets]) if self.buckets else torch.zeros(0)
        if dist.get_world_size(self.dp_group) > 1:
            dist.all_reduce(bounds, group=self.dp_group)
        for bucket, bound in zip(self.buckets, bounds.unbind(), strict=True):
            bucket.bound.copy_(bound)
            for group in bucket.sum_groups:
                dist.all_reduce(bucket.bound, group=group)
        most = max((float(bucket.bound) for bucket in self.buckets if bucket.bound.isfinite()), default=0.0)
        if dist.get_world_size() > 1:  # other shards may have smaller gradients
            everywhere = torch.tensor(most, dtype=torch.float64)
            dist.all_reduce(everywhere, op=dist.ReduceOp.MAX, group=world_group())
            most = float(everywhere)
        if most >= LIMIT:
            raise ConfigurationError(
                f"reproducible=True adds up gradients below {LIMIT:g}, and the largest ones of this step add up to "
                f"{most:g}; divide the loss, or use reproducible=False"
            )
        super().finish(factor)

    def global_norm(self, device: torch.device, norm_type: float = 2.0) -> Tensor:
        """Return the norm over all ranks from exact sums of squares, or other powers; refuses those out of range."""
        if norm_type == math.inf:  # nothing is added up
            return super().global_norm(device, norm_type)
        if norm_type > 2.0:
            raise ConfigurationError(
                f"reproducible=True adds up squares of gradients or lower powers, and norm_type={norm_type:g}; use 2 "
                "or less, inf, or reproducible=False"
            )
        parts = torch.zeros(NUM_PARTS + 2, dtype=torch.int64, device=device)
        for bucket in self.buckets:
            bucket.clear_stale()
            most = largest(bucket.shard_grads) if bucket.used else parts.new_zeros(())
            if not torch.isfinite(most):
                parts[NUM_PARTS] += 1
            elif most >= LIMIT:
                parts[NUM_PARTS + 1] += 1
            elif bucket.used and bucket.counted:
                parts[:NUM_PARTS] += power_parts(bucket.shard_grads, norm_type)
        if dist.get_world_size() > 1:
            dist.all_reduce(parts, group=world_group())
        *powers, nonfinite, beyond = parts.tolist()
        if beyond:
            raise ConfigurationError(
                f"reproducible=True adds up gradients below {LIMIT:g}, and one was set to more; set smaller ones, or "
                "use reproducible=False"
            )
        norm = torch.nan if nonfinite else norm_of_parts(powers, norm_type)
        return torch.tensor(norm, dtype=torch.float64, device=device)
