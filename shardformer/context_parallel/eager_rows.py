"""Rows of eager attention that see no key, as those of padding in front of a sequence.

Eager kernels of transformers add the lowest number of the dtype to the scores of hidden keys. Where all are hidden the
sums are equal, and so a row reads all tokens with equal weights. Other kernels return zero there. With padding in
front, the loss of the first real token of a sequence depends on it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardformer.context_parallel.blockwise import Softmax, repeated
from shardformer.context_parallel.zigzag import ContextParallelPass


def any_of_ranks(rows: Tensor, of: ContextParallelPass) -> Tensor | None:
    """Return `rows`, bool, if any rank has one that is true, and None otherwise: what follows needs all ranks."""
    found = rows.any().int()
    dist.all_reduce(found, dist.ReduceOp.MAX, group=of.axis.group)
    return rows if found.item() else None


def attend_uniformly(query: Tensor, key: Tensor, value: Tensor, of: ContextParallelPass, softmax: Softmax) -> Tensor:
    """Return what an eager kernel returns if all keys are hidden, [batch, heads, part, head_dim].

    Args:
        query: [batch, heads, part, head_dim].
        key, value: [batch, key/value heads, part, head_dim], of this rank.
    """
    key, value = (repeated(of.axis.gather(x, of.length, dim=2), query) for x in (key, value))
    # The scores are lost in the sum, but not their gradients.
    scores = query @ key.transpose(-1, -2) * softmax.scale + torch.finfo(query.dtype).min
    weights = scores.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    return F.dropout(weights, softmax.dropout) @ value
