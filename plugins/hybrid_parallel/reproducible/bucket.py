"""ExactBucket: a bucket whose gradients add up to the same bits in any order."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plugins.hybrid_parallel.reproducible.exact_sums import add_multiples, from_multiples
from plugins.hybrid_parallel.zero.bucket import Bucket


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

    def _kept_is_exact(self) -> bool:
        return self._kept is not None and self.shard_grads._version == self._versions_of["kept"]

    def _provide_flat_grads(self) -> None:
        if self.flat_grads is None and not self.used and self.options.num_shards == 1:
            self.flat_grads, self._kept = self._kept, None  # the memory of the last step, whose gradients were cleared
        super()._provide_flat_grads()
