"""The gradients of a bucket: one flat tensor in which those of all passes add up, and the user's access to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from plugins.hybrid_parallel.loss.arithmetic import norm_of
from shardformer.distributed.collectives import all_gather_flat

if TYPE_CHECKING:
    from plugins.hybrid_parallel.zero.bucket_layout import BucketOptions, BucketSlice
    from plugins.hybrid_parallel.zero.grad_buffer_pool import FreshBuffers, GradBufferPool


_MOST_WAITING = 16 * 2**20  # elements


def zero(tensors: Sequence[Tensor]) -> None:
    """Zero the tensors, on a GPU by one kernel."""
    if tensors:
        torch._foreach_zero_(tensors)


class BucketGradients:
    """The part of a bucket that takes the gradients of the backward pass, and scales, exposes, sets and drops them.

    On a GPU a gradient waits for others, and all of them are copied at one time: a launch for each parameter would take
    the host longer than the copies take the GPU. Whoever reads `flat_grads` finds them there.

    Attributes:
        written: indices of parameters with local gradients that are not reduced yet.
        adds: whether any gradient of this step is a sum over passes.
        shard_grads: this rank's shard of the reduced gradients.
        used: indices of parameters with reduced gradients.
        results: memory of reductions to shards.
        in_passes: indices of parameters with gradients in passes that were reduced by themselves.
        norm: Euclidean, of the shard of the reduced gradients (0-d, float64); None if it is not known.
    """

    params: list[nn.Parameter]
    offsets: list[int]
    pieces: Sequence[BucketSlice]
    options: BucketOptions
    memory: GradBufferPool
    flat: Tensor
    grad_dtype: torch.dtype
    sum_dtype: torch.dtype | None
    shard_grads: Tensor | None
    used: set[int]
    results: GradBufferPool | FreshBuffers
    in_passes: set[int]
    norm: Tensor | None
    _gaps: list[tuple[int, int]]
    _result: Tensor | None
    _sum_of_passes: Tensor | None

    def __init__(self) -> None:
        self._flat_grads: Tensor | None = None
        self.written: set[int] = set()
        self.adds = False
        self._lent: set[int] = set()  # parameters whose slots were handed to a matmul to write gradients to
        self._waiting: dict[int, Tensor] = {}  # gradients that are not in `_flat_grads` yet
        self._num_waiting = 0
        self._viewed: Tensor | None = None  # the tensor that `_views` are views of
        self._views: list[Tensor] = []
        self._pieces_viewed: Tensor | None = None
        self._piece_views: list[Tensor] = []
        self.is_shown = False  # whether user code may hold views of the reduced gradients
        self._stale: set[int] = set()  # indices of dropped gradients whose values are still in the shard

    @property
    def launched(self) -> bool:
        """Whether the reduction of this step's gradients has started."""
        raise NotImplementedError

    @property
    def flat_grads(self) -> Tensor | None:
        """The local gradients of all parameters, while this rank has them."""
        if self._waiting:
            self._take_waiting()
        return self._flat_grads

    @flat_grads.setter
    def flat_grads(self, value: Tensor | None) -> None:
        self._flat_grads = value

    def accumulate(self, index: int, grad: Tensor, stays: bool = False) -> None:
        """Add a local gradient to the bucket.

        Args:
            stays: whether no other code changes `grad` later.
        """
        if self.launched:
            raise RuntimeError("a gradient arrived after its bucket was reduced; run the backward pass once a step")
        if stays and grad.is_cuda and index not in self.written and index not in self._lent:
            self._wait_for_others(index, grad)
            return
        self._provide_flat_grads()
        view = self._grad_view(index)
        if index in self._lent:
            self._lent.discard(index)
            self.written.add(index)
            if grad.data_ptr() != view.data_ptr():  # autograd has summed it with other gradients
                view.copy_(grad)
        elif index in self.written:
            self.adds = True
            view.add_(grad)
        else:
            view.copy_(grad)
            self.written.add(index)

    def borrow_grad_view(self, index: int) -> tuple[Tensor, bool] | None:
        """Return the slot for the next gradient and whether to add to it; None if `accumulate` must copy it."""
        if self.launched or index in self._lent:
            return None
        self._provide_flat_grads()
        self._lent.add(index)
        self.adds = self.adds or index in self.written
        return self._grad_view(index), index in self.written

    def forget_waiting(self) -> None:
        """Drop the gradients that are not in the flat tensor yet."""
        self._waiting.clear()
        self._num_waiting = 0

    def _wait_for_others(self, index: int, grad: Tensor) -> None:
        self._waiting[index] = grad
        self.written.add(index)
        self._num_waiting += grad.numel()
        if self._num_waiting >= _MOST_WAITING:
            self._take_waiting()

    def _take_waiting(self) -> None:
        waiting = dict(self._waiting)
        self.forget_waiting()
        self._provide_flat_grads()
        torch._foreach_copy_([self._grad_view(index) for index in waiting], list(waiting.values()))

    def _provide_flat_grads(self) -> None:
        if self._flat_grads is None and not self.used and self.options.num_shards == 1:
            # The gradients of the last step were cleared: reuse their memory.
            self._flat_grads, self.shard_grads = self.shard_grads, None
        if self._flat_grads is None:
            dtype = self.sum_dtype or self.grad_dtype
            self._flat_grads = self.memory.take(self.flat.numel(), dtype, self.flat.device)
            # The norm includes the gaps between parameters.
            zero([self._flat_grads[start:stop] for start, stop in self._gaps])

    def _grad_view(self, index: int) -> Tensor:
        flat = self.flat_grads
        if not self._keeps_views(flat):
            return self._view_of(flat, index)
        if self._viewed is not flat:
            self._viewed, self._views = flat, [self._view_of(flat, each) for each in range(len(self.params))]
        return self._views[index]

    def _keeps_views(self, grads: Tensor) -> bool:
        """Whether later steps have their gradients in the same memory of a GPU."""
        return grads.is_cuda and self.options.num_shards == 1 and not self.options.states.is_offloaded

    def _views_of_pieces(self, grads: Tensor) -> list[Tensor]:
        """Return the gradient of each piece, given the shard of them; the same views in each step if that can be."""
        if self._pieces_viewed is not grads:
            views = [piece.view(grads).view_as(piece.parameter) for piece in self.pieces]
            if not self._keeps_views(grads):
                return views
            self._pieces_viewed, self._piece_views = grads, views
        return self._piece_views

    def _forget_views(self) -> None:
        self._viewed = self._pieces_viewed = None
        self._views, self._piece_views = [], []

    def _view_of(self, flat: Tensor, index: int) -> Tensor:
        param, offset = self.params[index], self.offsets[index]
        return flat[offset : offset + param.numel()].view(param.shape)

    # ----- what user code does to gradients between the backward pass and the step -----

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
