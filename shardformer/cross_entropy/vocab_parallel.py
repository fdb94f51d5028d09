"""Cross-entropy over logits that are sharded along the vocabulary, without gathering them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardformer.distributed.blocks import BlockedTensor, blocks_of, sum_over_blocks


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
    if not isinstance(logits, BlockedTensor):
        return _VocabParallelCrossEntropy.apply(labels, [vocab_range], group, ignore_index, logits)
    # Not from the start of the range: a rank whose rows are all padding has no place in the vocabulary.
    width, end = logits.blocks[0].shape[1], vocab_range[1]
    ranges = [(min(block * width, end), min((block + 1) * width, end)) for block in logits.region.local]
    return _VocabParallelCrossEntropy.apply(labels, ranges, group, ignore_index, *logits.blocks)


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """-log softmax at the label, after Megatron-LM (arXiv 1909.08053, section 3): two all-reduces of [tokens].

    The vocabulary of this rank has one part, or several blocks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        labels: Tensor,
        ranges: Sequence[tuple[int, int]],
        group: ProcessGroup,
        ignore_index: int,
        *logits: Tensor,
    ) -> Tensor:
        valid = [part[:, : stop - start] for part, (start, stop) in zip(logits, ranges, strict=True)]  # without padding
        # A rank whose rows are all padding has no logits but must still join the all-reduce of the maximum.
        peaks = [part.amax(dim=-1) for part in valid if part.shape[1]] or [logits[0].new_full(labels.shape, -torch.inf)]
        peak = reduce(torch.maximum, peaks)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)

        sums, saved = [], []  # sum of exponentials and logit of the label, [2, tokens] each
        for part, (start, stop) in zip(valid, ranges, strict=True):
            probabilities = (part - peak.unsqueeze(-1)).exp_()
            here = (labels >= start) & (labels < stop)
            local_labels = (labels - start).masked_fill(~here, 0)
            sums.append(logits[0].new_zeros(2, labels.numel()))
            if stop > start:
                sums[-1][0] = probabilities.sum(dim=-1)
                picked = part.gather(1, local_labels.unsqueeze(-1)).squeeze(-1) - peak
                sums[-1][1] = picked.masked_fill(~here, 0.0)
            saved += [probabilities, local_labels, here]
        total = _sum(sums, group)

        counted = labels != ignore_index
        for probabilities in saved[::3]:
            probabilities.div_(total[0].unsqueeze(-1))
        ctx.save_for_backward(counted, *saved)
        ctx.padding = [whole.shape[1] - part.shape[1] for whole, part in zip(logits, valid, strict=True)]
        return (total[0].log() - total[1]).masked_fill(~counted, 0.0)  # [tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        counted, *saved = ctx.saved_tensors
        grads = []
        for index, padding in enumerate(ctx.padding):
            probabilities, local_labels, here = saved[3 * index : 3 * index + 3]
            if probabilities.shape[1]:
                probabilities.scatter_add_(1, local_labels.unsqueeze(-1), -here.to(probabilities.dtype).unsqueeze(-1))
            probabilities.mul_((counted * grad).unsqueeze(-1))
            grads.append(F.pad(probabilities, (0, padding)) if padding else probabilities)
        return None, None, None, None, *grads


def _sum(parts: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    if blocks_of(group) is not None:
        return sum_over_blocks(parts, group)
    (total,) = parts
    dist.all_reduce(total, group=group)
    return total
