"""Access to a bucket's gradients for user code between the backward pass and the step."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plugins.hybrid_parallel.loss.arithmetic import norm_of
from plugins.hybrid_parallel.zero.local_gradients import LocalGradients, zero
from shardformer.distributed.collectives import all_gather_flat

if TYPE_CHECKING:
    from plugins.hybrid_parallel.zero.grad_buffer_pool import FreshBuffers, GradBufferPool


class GradientsByHand(LocalGradients):
    """The part of a bucket that scales, exposes, sets and drops gradients.

    Attributes:
        shard_grads: this rank's shard of the reduced gradients.
        used: indices of parameters with reduced gradients.
        results: memory of reductions to shards.
        in_passes: indices of parameters with gradients in passes that were reduced by themselves.
        norm: Euclidean, of the shard of the reduced gradients (0-d, float64); None if it is not known.
    """

    results: GradBufferPool | FreshBuffers
    in_passes: set[int]
    _result: Tensor | None
    _sum_of_passes: Tensor | None
    norm: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.is_shown = False  # whether user code may hold views of the reduced gradients
        self._stale: set[int] = set()  # indices of dropped gradients whose values are still in the shard

    def scale_grads(self, factor: Tensor | float) -> None:
        """Multiply all existing gradients, reduced or not, by `factor`."""
        for reduced in (self.shard_grads if self.used else None, self._sum_of_passes):
            if reduced is not None:
                self.norm = None
                reduced.mul_(factor if isinstance(factor, float) else factor.to(reduced))
                self.options.states.page_out(reduced)
        if self.written:
            factor = factor if isinstance(factor, float) else factor.to(self.flat_grads.dtype)
            torch._foreach_mul_([self._grad_view(index) for index in self.written], factor)

    def clamp_grads(self, limit: float) -> None:
        """Clamp every element of the reduced gradients to ±`limit`."""
        if self.used:
            self.norm = None
            self.shard_grads.clamp_(-limit, limit)
            self.page_out_grads()

    def has_grad(self, index: int) -> bool:
        """Return whether a parameter has a gradient, reduced or not."""
        return index in self.used or index in self.written or index in self.in_passes

    def reduced_grad(self, index: int) -> Tensor:
        """Return a view of a gradient that this rank has whole; the caller may read, change and keep it."""
        self.is_shown = True
        param, offset = self.params[index], self.offsets[index]
        return self.shard_grads[offset : offset + param.numel()].view(param.shape)

    def set_grad(self, index: int, value: Tensor) -> None:
        """Set a gradient that this rank has whole."""
        if not self.used:
            self.drop_grads()
            self._provide_flat_grads()
            self.shard_grads = torch.zeros_like(self.flat_grads, dtype=self.grad_dtype)
        self._stale.discard(index)
        self.used.add(index)
        self.reduced_grad(index).copy_(value)

    def reduced_pieces(self, indices: Collection[int]) -> dict[int, Tensor]:
        """Return this rank's pieces of reduced gradients before `keep`, by parameter index."""
        return {piece.index: piece.view(self._result) for piece in self.pieces if piece.index in indices}

    def replace_reduced(self, index: int, local: Tensor) -> None:
        """Replace a reduced gradient by `local`, which has the parameter's shape."""
        for piece in self.pieces:
            if piece.index == index:
                piece.view(self._result).copy_(local.reshape(-1)[piece.start : piece.stop])
        self.norm = None

    def forget_grad(self, index: int) -> None:
        """Drop one gradient; existing views keep their values."""
        self.norm = None
        self.written.discard(index)
        if index in self.in_passes:
            self.in_passes.discard(index)
            zero([piece.view(self._sum_of_passes) for piece in self.pieces if piece.index == index])
        if index in self.used:
            self.used.discard(index)
            self._stale.add(index)
        if not self.used and self.is_shown:
            self.drop_grads()

    def local_grads(self) -> dict[int, Tensor] | None:
        """Return this rank's input to the last reduction by parameter index.

        Returns None if the result has overwritten the input, or the input was freed.
        """
        if self.options.num_shards == 1 or self.flat_grads is None:
            return None
        return {index: self._grad_view(index) for index in range(len(self.params))}

    def give_local_grads(self) -> None:
        """Give the memory of the local gradients back to the pool."""
        self.memory.give(self.flat_grads)
        self.flat_grads = None

    def clear_grads(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or set existing ones to zero, which still move parameters by momentum and decay."""
        if not set_to_none:
            if self.used:
                self.shard_grads.zero_()
            zero([self._grad_view(index) for index in self.written])
            if self._sum_of_passes is not None:
                self._sum_of_passes.zero_()
            self.norm = None
            self.page_out_grads()
            return
        self.forget_waiting()
        if self.options.num_shards > 1 or self.is_shown:
            self.drop_grads()  # the activations of the next forward pass can use the memory
        if self.options.num_shards > 1 and self.flat_grads is not None and not self.launched:
            self.give_local_grads()
        if self._sum_of_passes is not None:
            self.results.give(self._sum_of_passes)
        self._sum_of_passes = None
        for indices in (self._stale, self.written, self.in_passes, self._lent, self.used):
            indices.clear()
        for piece in self.pieces:
            piece.parameter.grad = None

    def gather_pieces(self, values: dict[int, Tensor], dtype: torch.dtype) -> dict[int, Tensor]:
        """All-gather whole local tensors, in the shape of the parameters, from the pieces of all ranks.

        All data-parallel ranks must call this; parameters without a piece on any rank are zeros.

        Args:
            values: parameter index -> values of its piece on this rank.
            dtype: dtype of the result.

        Returns:
            The tensors by parameter index.
        """
        flat = torch.zeros(self.flat.numel(), dtype=dtype, device=self.flat.device)
        own = self.own_shard(flat)
        for piece in self.pieces:
            if piece.index in values:
                piece.view(own).copy_(values[piece.index].reshape(-1))
        if self.options.num_shards > 1:
            all_gather_flat(flat, own.clone(), group=self.options.shard_group)
        return {
            index: flat[offset : offset + param.numel()].view(param.shape)
            for index, (param, offset) in enumerate(zip(self.params, self.offsets, strict=True))
        }

    def keep_on_host(self) -> None:
        """Add the result of the reduction on a GPU to the shard in host memory."""
        result = self._result
        if self.used:
            self.norm = None
            self.shard_grads.add_(result.cpu())
            return
        self.norm = norm_of(result)
        if self.shard_grads is None:
            self.shard_grads = self.options.states.empty(len(result), result.dtype, result.device)
        self.shard_grads.copy_(result)

    def page_out_grads(self) -> None:
        """Let offloaded gradients go until they are used again."""
        for grads in (self.shard_grads, self._sum_of_passes, self._result, self.flat_grads):
            if grads is not None:
                self.options.states.page_out(grads)

    def drop_grads(self) -> None:
        """Release the memory of the reduced gradients, without reusing it if user code may still read it."""
        if self.shard_grads is not None and self.options.num_shards > 1 and not self.is_shown:
            self.results.give(self.shard_grads)
        elif self.shard_grads is not None:
            self.memory.leave(self.shard_grads)
        self.shard_grads, self.is_shown = None, False
        self._forget_views()
        self._stale.clear()

    def clear_stale(self) -> None:
        """Zero the slots of dropped gradients, because later gradients are added there and the norm includes them."""
        if not self._stale or not self.used:
            return
        if self.is_shown:
            left, self.shard_grads, self.is_shown = self.shard_grads, self.shard_grads.clone(), False
            self.memory.leave(left)
        zero([piece.view(self.shard_grads) for piece in self.pieces if piece.index in self._stale])
        self._stale.clear()
