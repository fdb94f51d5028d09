"""Cross-entropy and scores of tokens over logits that are sharded along the vocabulary, without gathering them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from shardformer.cross_entropy import fused_linear
from shardformer.cross_entropy.fused_linear import DeferredLogits
from shardformer.distributed.blocks import BlockedTensor, blocks_of, sum_over_blocks
from shardformer.distributed.collectives import reduce_from_region


def cross_entropy_sum(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Sum the cross-entropy over the labels that are not `ignore_index`; 0 if there are none.

    Args:
        logits: [tokens, classes].
        labels: [tokens].

    The result is at least fp32, whatever the precision of the logits.
    """
    return F.cross_entropy(_at_least_fp32(logits), labels, ignore_index=ignore_index, reduction="sum")


def cross_entropy_of_tokens(
    logits: Tensor,
    labels: Tensor,
    vocab_range: tuple[int, int] | None = None,
    group: ProcessGroup | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Return losses [tokens], at least fp32, 0 where the label is `ignore_index`.

    Args:
        logits: [tokens, classes], or [tokens, padded vocabulary / ranks] with `vocab_range`.
        labels: [tokens], the same on every rank.
        vocab_range: first and end row of the vocabulary that the local `logits` cover; None for whole logits.
        group: the axis over which the vocabulary is sharded.
    """
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
    """-log softmax at the label, after Megatron-LM (arXiv 1909.08053, section 3): two all-reduces of [tokens]."""

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
        if blocks_of(group) is not None:
            total = sum_over_blocks(sums, group)
        else:
            (total,) = sums
            dist.all_reduce(total, group=group)

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


def token_scores(
    logits: Tensor,
    labels: Tensor,
    fields: tuple[str, ...],
    temperature: float = 1.0,
    vocab_range: tuple[int, int] | None = None,
    group: ProcessGroup | None = None,
    ignore_index: int = -100,
    chunk_rows: int | None = None,
) -> dict[str, Tensor]:
    """Return the fields asked for, each [...], differentiable and at least fp32; 0 where the label is `ignore_index`.

    Logits exist for one chunk of tokens at a time, and are computed again in the backward pass (arXiv 1604.06174).

    Args:
        logits: [..., vocabulary], deferred or not, or this rank's [..., padded vocabulary / ranks] with `vocab_range`.
        labels: [...], the same on every rank of `group`.
        fields: among "log_probs", "entropy", "log_sum_sq_probs" (log of the sum of squared probabilities),
            "mean_logits", and "is_top1" (whether the label has the largest logit).
        temperature: divides the logits.
        vocab_range: first and end row of the vocabulary that `logits` cover; None for all.
        group: the axis over which the vocabulary is sharded.
        chunk_rows: tokens in a chunk; None for as many as `fused_linear` allows.
    """
    is_deferred = isinstance(logits, DeferredLogits) and logits.logits is None
    source, compute = (logits.call.hidden, logits.call.compute) if is_deferred else (logits, lambda part: part)
    columns, device = logits.shape[-1], logits.device
    rows = fused_linear.rows_of_chunk(columns, device) if chunk_rows is None else chunk_rows
    source, targets = source.reshape(-1, source.shape[-1]), labels.reshape(-1)
    score = partial(_scores, compute, fields, temperature, vocab_range, group)
    trains = torch.is_grad_enabled() and logits.requires_grad
    again = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False) if trains else score
    chunks = [again(*parts) for parts in zip(source.split(rows), targets.split(rows), strict=True)]
    found = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    ignored = labels == ignore_index
    return {name: each.view(labels.shape).masked_fill(ignored, 0) for name, each in zip(fields, found, strict=True)}


def _scores(
    compute: Callable[[Tensor], Tensor],
    fields: tuple[str, ...],
    temperature: float,
    vocab_range: tuple[int, int] | None,
    group: ProcessGroup | None,
    source: Tensor,
    labels: Tensor,
) -> list[Tensor]:
    """Return the fields of a chunk, [chunk] each; `compute(source)` are its logits."""
    logits = compute(source)
    start, stop = (0, logits.shape[-1]) if vocab_range is None else vocab_range
    numbers = logits[..., : stop - start] / temperature  # without padding
    numbers = numbers if numbers.dtype == torch.float64 else (logits[..., : stop - start].float() / temperature)
    here = (labels >= start) & (labels < stop)
    peak = numbers.detach().amax(-1) if stop > start else numbers.new_full(labels.shape, -torch.inf)
    if group is not None:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    centred = numbers - peak[:, None]
    exponentials = centred.exp()
    local = (labels - start).masked_fill(~here, 0)[:, None]
    at_label = centred.gather(1, local)[:, 0].masked_fill(~here, 0) if stop > start else torch.zeros_like(peak)
    sums = {"total": exponentials.sum(-1), "at_label": at_label}
    sums |= {"weighted": (exponentials * centred).sum(-1)} if "entropy" in fields else {}
    with torch.no_grad():
        sums |= {"squares": exponentials.square().sum(-1)} if "log_sum_sq_probs" in fields else {}
        sums |= {"logits": numbers.sum(-1)} if "mean_logits" in fields else {}
        sums |= {"columns": torch.full_like(peak, stop - start)} if "mean_logits" in fields else {}
    joined = torch.stack(list(sums.values()))
    sums = dict(zip(sums, joined if group is None else reduce_from_region(joined, group), strict=True))
    log_total = sums["total"].log()
    values = {
        # Of whole logits, the bits of torch's log_softmax.
        "log_probs": lambda: (
            numbers.log_softmax(-1).gather(1, local)[:, 0] if group is None else sums["at_label"] - log_total
        ),
        "entropy": lambda: log_total - sums["weighted"] / sums["total"],
        "log_sum_sq_probs": lambda: (sums["squares"].log() - 2 * log_total).detach(),
        "mean_logits": lambda: (sums["logits"] / sums["columns"]).detach(),
        "is_top1": lambda: sums["at_label"].detach() >= 0,
    }
    return [values[name]() for name in fields]
