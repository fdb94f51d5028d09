"""Outputs of whole sequences and whole vocabularies, from those of this rank's parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardformer.context_parallel.zigzag import ZigzagSharding
from shardformer.distributed.blocked_collectives import joined_blocks
from shardformer.distributed.collectives import gather_from_region
from shardformer.layers.lm_head import VocabParallelLMHead


def with_whole_logits(outputs: Any, module: nn.Module) -> Any:
    """Return `outputs` of `module` with logits gathered over the vocabulary-parallel ranks."""
    head = next((each for each in module.modules() if isinstance(each, VocabParallelLMHead)), None)
    if head is None or not isinstance(outputs, Mapping):
        return outputs

    def whole(value: Any) -> Any:
        local_rows = head.weight.shape[1 if head.transposed else 0]
        value = joined_blocks(value, -1)
        if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[-1] != local_rows:
            return value
        return gather_from_region(value, value.dim() - 1, head.group)[..., : head.full_out_features]

    logits = {key: whole(value) for key, value in outputs.items() if key.endswith("logits")}
    return type(outputs)(**{**outputs, **logits})


def with_whole_sequences(outputs: Any, axis: ZigzagSharding | None) -> Any:
    """Gather outputs of this rank's part of each sequence; None for `axis` if they are of whole sequences."""
    if axis is None:
        return outputs
    length = axis.latest.length
    part = 2 * axis.chunk(length)

    def whole(value: Any) -> Any:
        is_part = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == part
        return axis.gather(value, length) if is_part else value

    if not isinstance(outputs, Mapping):
        return whole(outputs)
    return type(outputs)(**{key: whole(value) for key, value in outputs.items()})
