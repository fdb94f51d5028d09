"""Which of the tokens that a rank computes are no padding, where ranks have parts of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardformer.context_parallel.zigzag import ZigzagSharding
from shardformer.distributed.collectives import local_slice


def token_mask(inputs: Mapping[str, Any], axis: ZigzagSharding | None, tp_group: ProcessGroup | None) -> Tensor | None:
    """Return the attention mask of this rank's tokens, [batch, seq/(cp * tp)]; None if there is none and all count.

    Args:
        inputs: of the model's forward, of whole sequences.
        axis: the ranks that share sequences; None without context parallelism.
        tp_group: tensor-parallel ranks that have parts of sequences in every layer; None if they see the same tokens.
    """
    mask = inputs.get("attention_mask")
    if axis is None and tp_group is None:
        return mask
    if mask is None:
        tokens = next(inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None)
        mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    mask = mask if axis is None else axis.take(mask)
    return mask if tp_group is None else local_slice(mask, 1, tp_group)
