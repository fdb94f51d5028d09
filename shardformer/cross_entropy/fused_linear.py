"""Cross-entropy of a language-model head computed from hidden states, with logits of one chunk of tokens at a time.

After Cut Cross-Entropy (arXiv 2411.09009, section 4) and Liger-Kernel (arXiv 2410.10989, section 3.2), in plain torch,
for whole heads and for vocabulary-parallel heads (arXiv 1909.08053, section 3).

A head returns `DeferredLogits` for it: a placeholder of the shape and dtype of the logits. A loss that knows it uses
the hidden states and the weight. Any other access - a cap, a scale, a bias, a slice, a hook - gets the logits, as if
the head had computed them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from shardformer.distributed.collectives import all_gather_flat
from shardformer.matmul.kernel import decided, matrix, runs_on

# Bytes of fp32 logits per chunk. Each chunk reads the weight and its gradient once, so the faster matrix products are
# relative to memory, the more rows a chunk needs. The CPU number is measured; the other follows from data sheets.
CPU_CHUNK_BYTES = 128 * 2**20
ACCELERATOR_CHUNK_BYTES = 512 * 2**20
FEWEST_ROWS = 128


class _State:
    """State of this process; global, as passes run one at a time."""

    finds_gradients = False


def chunk_bytes(device: torch.device) -> int:
    """Return how many bytes the logits of one chunk may take on `device`, counted in fp32."""
    return CPU_CHUNK_BYTES if runs_on(device) == "cpu" else ACCELERATOR_CHUNK_BYTES


def rows_of_chunk(columns: int, device: torch.device) -> int:
    """Return the number of tokens in a chunk of logits with `columns` columns."""
    return max(FEWEST_ROWS, chunk_bytes(device) // max(4 * columns, 1) // FEWEST_ROWS * FEWEST_ROWS)


@contextmanager
def finding_gradients() -> Iterator[None]:
    """Mark work that runs inside a forward pass but belongs to the backward pass."""
    _State.finds_gradients = True
    try:
        yield
    finally:
        _State.finds_gradients = False


def finds_gradients() -> bool:
    """Return whether a forward pass is inside `finding_gradients`."""
    return _State.finds_gradients


def fused_linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    vocab_range: tuple[int, int] | None = None,
    group: ProcessGroup | None = None,
    ignore_index: int = -100,
    chunk_rows: int | None = None,
) -> Tensor:
    """Sum the cross-entropy of `hidden weight^T + bias` over the labels that are not `ignore_index` (0-d).

    The forward pass computes the gradients chunk by chunk; the backward pass scales them, and can run only once.
    Saved for it are the gradient of `hidden`, and those of `weight` and `bias` in at least fp32.

    Args:
        hidden: [..., hidden], the same on every rank of `group`; its gradient is summed over them.
        weight: [vocabulary, hidden], or this rank's [padded vocabulary / ranks, hidden] with `vocab_range`.
        bias: [vocabulary] or this rank's shard of it, or None.
        labels: [...], the same on every rank of `group`.
        vocab_range: first and end row of the vocabulary that the local `weight` covers; None for all.
        group: the axis over which the vocabulary is sharded.
        chunk_rows: tokens in a chunk; None for as many as `rows_of_chunk` allows.

    The result is at least fp32, whatever the precision of the head.
    """
    start, stop = (0, len(weight)) if vocab_range is None else vocab_range
    rows = rows_of_chunk(len(weight), hidden.device) if chunk_rows is None else chunk_rows
    cut = _VocabShard(start, stop, group, ignore_index, rows, torch.is_grad_enabled())
    return _HeadCrossEntropy.apply(matrix(hidden), weight, bias, labels.reshape(-1), cut)


@dataclass(frozen=True)
class _VocabShard:
    """Partition of the work: vocabulary rows `start:stop` on this rank, and chunks of `rows` tokens."""

    start: int
    stop: int
    group: ProcessGroup | None
    ignore_index: int
    rows: int
    trains: bool


class _ChunkedLoss:
    """Accumulates losses and gradients over chunks.

    Attributes:
        losses: [tokens], 0 where the label is ignored.
        grad_hidden, grad_weight, grad_bias: gradients of the summed losses; None if not needed.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, cut: _VocabShard, needs: tuple[bool, bool, bool]
    ) -> None:
        self.cut, self.needs = cut, needs
        # Padding columns are excluded.
        self.weight = weight[: cut.stop - cut.start]
        self.bias = None if bias is None else bias[: cut.stop - cut.start]
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        rows = min(cut.rows, len(hidden))
        # One buffer for all chunks: repeated allocation costs more than the computation.
        self._logits = hidden.new_empty(rows, len(self.weight))
        same = hidden.dtype == self.dtype
        self._numbers = self._logits if same else torch.empty_like(self._logits, dtype=self.dtype)
        self.losses = hidden.new_empty(len(hidden), dtype=self.dtype)
        self.grad_hidden = torch.empty_like(hidden) if needs[0] else None
        self.grad_weight = weight.new_zeros(weight.shape, dtype=self.dtype) if needs[1] else None
        self.grad_bias = bias.new_zeros(bias.shape, dtype=self.dtype) if needs[2] else None

    def add(self, hidden: Tensor, labels: Tensor, first: int) -> None:
        """Process one chunk: `hidden` [chunk, hidden] and `labels` [chunk], starting at token number `first`."""
        logits = self._logits[: len(hidden)]
        numbers = logits if self._numbers is self._logits else self._numbers[: len(hidden)]
        if self.bias is None:
            torch.mm(hidden, self.weight.t(), out=logits)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=logits)
        here = (labels >= self.cut.start) & (labels < self.cut.stop)
        if self.cut.group is None:  # refuse an invalid label instead of taking it for another rank's
            here = labels != self.cut.ignore_index
        local = (labels - self.cut.start).masked_fill(~here, 0).unsqueeze(-1)
        counted = labels != self.cut.ignore_index
        offset, total, picked, exponentials = self._exponentials(logits, numbers, local, here)
        log_sum, label_logit = self._over_ranks(offset, total, picked)
        self.losses[first : first + len(hidden)] = (log_sum - label_logit).masked_fill(~counted, 0.0)
        if any(self.needs):
            # Gradient of the logits: softmax minus one at the label. Reuses `logits`, which are not read again.
            share = (offset - log_sum).exp_().masked_fill_(~counted, 0.0).unsqueeze(-1)
            if len(self.weight):
                at_label = exponentials.gather(1, local) * share - (here & counted).unsqueeze(-1).to(self.dtype)
                self._write(logits, exponentials, share)
                logits.scatter_(1, local, at_label.to(logits.dtype))
            with finding_gradients():
                self._add_gradients(hidden, logits, first)

    def _exponentials(
        self, logits: Tensor, numbers: Tensor, local: Tensor, here: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return offset, sum of exp(logits - offset), own label's logit or 0, [chunk] each, and the exp itself."""
        if not len(self.weight):  # all columns are padding; this rank must still join the collective
            nothing = logits.new_zeros(len(logits), dtype=self.dtype)
            return nothing - torch.inf, nothing, nothing, numbers
        picked = logits.gather(1, local).squeeze(-1).to(self.dtype).masked_fill(~here, 0.0)
        if numbers is not logits and runs_on(logits.device) == "cuda":
            # One kernel that reads 16 bit and writes fp32, instead of three over fp32. The largest share is 1 / sum.
            peak, at_peak = logits.max(dim=-1, keepdim=True)
            shares = torch.softmax(logits, dim=-1, dtype=self.dtype, out=numbers)
            total = shares.gather(1, at_peak).squeeze(-1).reciprocal_()
            return peak.squeeze(-1).to(self.dtype) + total.log(), torch.ones_like(total), picked, shares
        peak = logits.amax(dim=-1).to(self.dtype)
        if numbers is not logits:  # operators on mixed dtypes make temporary copies on CPUs
            numbers.copy_(logits)
        exponentials = numbers.sub_(peak.unsqueeze(-1)).exp_()
        return peak, exponentials.sum(dim=-1), picked, exponentials

    @staticmethod
    def _write(logits: Tensor, exponentials: Tensor, share: Tensor) -> None:
        """Write `exponentials * share` to `logits`, which may be the same memory."""
        if runs_on(logits.device) == "cuda":
            torch.mul(exponentials, share, out=logits)
        else:
            exponentials.mul_(share)
            if logits is not exponentials:
                logits.copy_(exponentials)

    def _over_ranks(self, peak: Tensor, total: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        """Reduce log-sum-exp and label's logit, [chunk] each, over ranks by one all-gather, not two all-reduces."""
        if self.cut.group is None:
            return peak + total.log(), picked
        mine = torch.stack([peak, total, picked])
        everyone = mine.new_empty(dist.get_world_size(self.cut.group) * 3, len(peak))
        all_gather_flat(everyone, mine, group=self.cut.group)
        peaks, totals, labels = everyone.view(-1, 3, len(peak)).unbind(1)  # [ranks, chunk]
        highest = peaks.amax(dim=0)
        return highest + (totals * (peaks - highest).exp()).sum(dim=0).log(), labels.sum(dim=0)

    def _add_gradients(self, hidden: Tensor, grad_logits: Tensor, first: int) -> None:
        if self.grad_hidden is not None:
            torch.mm(grad_logits, self.weight, out=self.grad_hidden[first : first + len(hidden)])
        if self.grad_bias is not None:
            self.grad_bias[: len(self.weight)] += grad_logits.sum(dim=0, dtype=self.dtype)
        if self.grad_weight is None:
            return
        if grad_logits.dtype == self.dtype:
            self.grad_weight[: len(self.weight)].addmm_(grad_logits.t(), hidden)
            return
        if runs_on(grad_logits.device) == "cuda":  # its products of 16 bit are sums in fp32
            total = self.grad_weight[: len(self.weight)]
            torch.addmm(total, grad_logits.t(), hidden, out_dtype=self.dtype, out=total)
            return
        # Accumulate 16-bit products in fp32, a few rows at a time: one product of all rows is as large as the weight.
        step = max(1, self._logits.numel() // hidden.shape[1])
        for row in range(0, len(self.weight), step):
            rows = slice(row, min(row + step, len(self.weight)))
            self.grad_weight[rows] += grad_logits[:, rows].t() @ hidden


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, cut: _VocabShard
    ) -> Tensor:
        ctx.group, ctx.dtypes = cut.group, (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        needs = tuple(need and cut.trains for need in ctx.needs_input_grad[:3])
        chunks = _ChunkedLoss(hidden, weight, bias, cut, needs)
        for first in range(0, len(hidden), cut.rows):
            chunk = slice(first, first + cut.rows)
            chunks.add(hidden[chunk], labels[chunk], first)
        ctx.save_for_backward(chunks.grad_hidden, chunks.grad_weight, chunks.grad_bias)
        return chunks.losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # In place, so torch refuses a second backward pass through the same graph: its saved tensors have changed.
        scaled = [None if each is None else each.mul_(grad) for each in ctx.saved_tensors]
        work = None
        if scaled[0] is not None and ctx.group is not None:
            # Each rank has the contribution of its shard of the vocabulary.
            work = dist.all_reduce(scaled[0], group=ctx.group, async_op=True)
        results = [None if each is None else each.to(dtype) for each, dtype in zip(scaled, ctx.dtypes, strict=True)]
        if work is not None:
            work.wait()
        return *results, None, None


@dataclass(frozen=True)
class LMHeadCall:
    """One call of a language-model head."""

    hidden: Tensor  # input of the head, [..., hidden]
    weight: Tensor  # [vocabulary, hidden], or this rank's shard of it
    bias: Tensor | None  # [vocabulary], or this rank's shard of it, or None
    compute: Callable[[Tensor], Tensor]  # the head's own forward, `hidden` -> logits
    # vocab_range, group: local rows of the vocabulary, and the axis over which it is sharded; None for all rows
    vocab_range: tuple[int, int] | None = None
    group: ProcessGroup | None = None


class DeferredLogits(torch.Tensor):
    """Logits [..., vocabulary] that are computed only when something reads them; see `logits_of` and `loss_of`."""

    __slots__ = (
        "call",
        "logits",
        "trains",
    )  # not in __dict__, by which debug tools recognize pending tensors

    @staticmethod
    def __new__(cls, call: LMHeadCall) -> DeferredLogits:
        """Create an empty tensor with the shape, dtype and device of the logits."""
        shape, hidden = (*call.hidden.shape[:-1], len(call.weight)), call.hidden
        self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=hidden.dtype, device=hidden.device, requires_grad=_needs_grad(call)
        )
        self.call, self.logits, self.trains = call, None, torch.is_grad_enabled()
        if _needs_grad(call):
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(_refuse_gradient)
        return self

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.contiguous and not kwargs and len(args) == 1:
            return args[0]
        args, kwargs = tree_map_only(cls, logits_of, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Only calls from C++ arrive here, such as a collective; no gradient flows through them.
        args, kwargs = tree_map_only(cls, logits_of, (args, kwargs or {}))
        return func(*args, **kwargs)


_LOOKS = frozenset(
    {
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda")
    }
    | {getattr(Tensor, name) for name in ("dim", "size", "numel", "nelement", "element_size", "is_floating_point")}
    | {Tensor.__hash__, Tensor.__len__}
)


def defer_logits(call: LMHeadCall) -> Tensor:
    """Return the logits of a head call: deferred if that saves memory, else computed at once."""
    is_plain = call.hidden.dtype == call.weight.dtype and not torch.is_autocast_enabled(call.hidden.device.type)
    return DeferredLogits(call) if is_plain and saves_memory(call) else call.compute(call.hidden)


def saves_memory(call: LMHeadCall) -> bool:
    """Return whether fp32 logits exceed a chunk of the loss and the weight gradient, which it keeps."""
    tokens, columns = call.hidden.shape[:-1].numel(), len(call.weight)
    kept = call.weight.numel() if torch.is_grad_enabled() and call.weight.requires_grad else 0
    return decided(call.weight.shape, 4 * tokens * columns > max(chunk_bytes(call.hidden.device), 4 * kept))


def logits_of(deferred: DeferredLogits) -> Tensor:
    """Compute the logits, with the autograd graph that the head would have given them."""
    if deferred.logits is None:
        with torch.set_grad_enabled(deferred.trains):
            deferred.logits = deferred.call.compute(deferred.call.hidden)
    return deferred.logits


def loss_of(logits: Tensor, labels: Tensor) -> Tensor | None:
    """Return the sum of cross-entropy (0-d) of unread deferred logits, else None; `labels`: [...], or -100."""
    if not isinstance(logits, DeferredLogits) or logits.logits is not None:
        return None
    call = logits.call
    return fused_linear_cross_entropy_sum(call.hidden, call.weight, call.bias, labels, call.vocab_range, call.group)


def _needs_grad(call: LMHeadCall) -> bool:
    tensors = (call.hidden, call.weight, call.bias)
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _refuse_gradient(_: Tensor) -> None:
    raise RuntimeError(
        "deferred logits were given to an autograd.Function, which cannot propagate their gradient; "
        "give it logits.view_as(logits), or use return_outputs=True"
    )
