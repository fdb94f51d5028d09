"""Cross-entropy over logits that are sharded along the vocabulary, without gathering them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


def cross_entropy_sum(
    logits: Tensor,
    labels: Tensor,
    vocab_range: tuple[int, int] | None = None,
    group: ProcessGroup | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Sum the cross-entropy over the labels that are not `ignore_index`; 0 if there are none.

    Args:
        logits: [tokens, classes], or [tokens, padded vocabulary / ranks] with `vocab_range`.
        labels: [tokens], the same on every rank.
        vocab_range: first and end row of the vocabulary that the local `logits` cover; None for whole logits.
        group: the axis over which the vocabulary is sharded.

    The result is at least fp32, whatever the precision of the logits.
    """
    if vocab_range is None:
        return F.cross_entropy(_at_least_fp32(logits), labels, ignore_index=ignore_index, reduction="sum")
    return cross_entropy_of_tokens(logits, labels, vocab_range, group, ignore_index).sum()


def cross_entropy_of_tokens(
    logits: Tensor,
    labels: Tensor,
    vocab_range: tuple[int, int] | None = None,
    group: ProcessGroup | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Return losses [tokens], 0 where the label is `ignore_index`; arguments and precision: see `cross_entropy_sum`."""
    logits = _at_least_fp32(logits)
    if vocab_range is None:
        return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none")
    return _VocabParallelCrossEntropy.apply(logits, labels, vocab_range, group, ignore_index)


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """-log softmax at the label, after Megatron-LM (arXiv 1909.08053, section 3): two all-reduces of [tokens]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_range: tuple[int, int], group: ProcessGroup, ignore_index: int
    ) -> Tensor:
        start, stop = vocab_range
        valid = logits[:, : stop - start]  # [tokens, local vocabulary], without padding columns
        # A rank whose rows are all padding has no logits but must still join the all-reduce of the maximum.
        peak = valid.amax(dim=-1) if stop > start else logits.new_full(labels.shape, -torch.inf)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)

        probabilities = (valid - peak.unsqueeze(-1)).exp_()
        here = (labels >= start) & (labels < stop)
        local_labels = (labels - start).masked_fill(~here, 0)
        sums = logits.new_zeros(2, labels.numel())  # sum of exponentials, logit of the label
        if stop > start:
            sums[0] = probabilities.sum(dim=-1)
            picked = valid.gather(1, local_labels.unsqueeze(-1)).squeeze(-1) - peak
            sums[1] = picked.masked_fill(~here, 0.0)
        dist.all_reduce(sums, group=group)

        counted = labels != ignore_index
        probabilities.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(probabilities, local_labels, here, counted)
        ctx.padding = logits.shape[1] - (stop - start)
        return (sums[0].log() - sums[1]).masked_fill(~counted, 0.0)  # [tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local_labels, here, counted = ctx.saved_tensors
        if probabilities.shape[1]:
            probabilities.scatter_add_(1, local_labels.unsqueeze(-1), -here.to(probabilities.dtype).unsqueeze(-1))
        probabilities.mul_((counted * grad).unsqueeze(-1))
        grad_logits = F.pad(probabilities, (0, ctx.padding)) if ctx.padding else probabilities
        return grad_logits, None, None, None, None
