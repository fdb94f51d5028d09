"""The local gradients of a bucket: one flat tensor in which the gradients of all passes add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from plugins.hybrid_parallel.zero.bucket_layout import BucketOptions, BucketSlice
    from plugins.hybrid_parallel.zero.grad_buffer_pool import GradBufferPool

_MOST_WAITING = 16 * 2**20  # elements


class LocalGradients:
    """The part of a bucket that takes the gradients of the backward pass.

    On a GPU a gradient waits for others, and all of them are copied at one time: a launch for each parameter would take
    the host longer than the copies take the GPU. Whoever reads `flat_grads` finds them there.

    Attributes:
        written: indices of parameters with local gradients that are not reduced yet.
        adds: whether any gradient of this step is a sum over passes.
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
    _gaps: list[tuple[int, int]]

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


def zero(tensors: Sequence[Tensor]) -> None:
    """Zero the tensors, on a GPU by one kernel."""
    if tensors:
        torch._foreach_zero_(tensors)
