"""Token mixers under context parallelism: state spaces, linear attention and short convolutions of hybrid models.

A recurrence needs the tokens in front of it, which other ranks have. So each rank runs a mixer over whole sequences and
keeps its own shard of what it returns: attention, experts, embeddings and the loss are shared, a mixer is not.
Every rank computes the gradients that its own tokens cause, and these are added up as those of all parameters are.

The sequences end with the padding to equal shards, which a causal mixer does not let reach the tokens in front of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shardformer.attention.token_mixers import TOKENS
from shardformer.context_parallel.zigzag import ZigzagSharding
from shardformer.distributed.collectives import pad_dim
from shardformer.sequence_parallel.split_gather import first_output

_MASK = "attention_mask"


def run_on_whole_sequences(mixers: Iterable[nn.Module], axis: ZigzagSharding) -> None:
    """Let mixers read [batch, seq, hidden], and return this rank's shard, [batch, part, hidden]."""
    # transformers cuts the mask of a mixer to as many tokens as this rank has. A layer that is recomputed gets the mask
    # of its own pass again, and so finds the whole one of that pass.
    whole_masks: WeakIdKeyDictionary = WeakIdKeyDictionary()
    for mixer in mixers:
        _run_whole(mixer, axis, whole_masks)


def _run_whole(mixer: nn.Module, axis: ZigzagSharding, whole_masks: WeakIdKeyDictionary) -> None:
    signature = inspect.signature(mixer.forward)

    def whole_mask(mask: Tensor) -> Tensor:
        """Return [batch, seq], not zero for tokens that are not padding."""
        if mask not in whole_masks:
            real, length = axis.latest.real, axis.latest.length
            whole = mask.new_ones(len(mask), length) if real is None else real.to(mask.dtype)
            whole_masks[mask] = pad_dim(whole, 1, 2 * axis.size)
        return whole_masks[mask]

    def gather(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        bound = signature.bind_partial(*args, **kwargs)
        given = bound.arguments
        part = given[TOKENS]
        given[TOKENS] = axis.gather(part, part.shape[1] * axis.size)
        if isinstance(given.get(_MASK), Tensor):
            given[_MASK] = whole_mask(given[_MASK])
        return bound.args, bound.kwargs

    mixer.register_forward_pre_hook(gather, with_kwargs=True)
    mixer.register_forward_hook(lambda _, __, output: first_output(output, axis.take))
