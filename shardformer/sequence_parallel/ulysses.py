"""All-to-all sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509).

In every layer a rank holds a slice of the sequence and whole weights. An all-to-all before the attention kernel gives
each rank the whole sequence for a subset of the heads; an all-to-all after it reverses this.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardformer.distributed.collectives import all_to_all, pad_dim
from shardformer.sequence_parallel.split_gather import SequenceParallel

# Names under which a cross-attention takes the hidden states of the encoder.
_MEMORY = ("key_value_states", "encoder_hidden_states")


class UlyssesAllToAll:
    """All-to-all exchange around attention in one sequence-parallel region. Copies of the model share it.

    Args:
        region: defines this rank's slice of the sequence.

    Attributes:
        memory_length: tokens of the encoder's sequence, where the attention that runs now reads it; None where it reads
            the sequence of its queries.
    """

    def __init__(self, region: SequenceParallel) -> None:
        self.region = region
        self.memory_length: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> UlyssesAllToAll:
        return self  # hooks of the copy tell this one of their calls

    def attach(self, attention: nn.Module) -> None:
        """Let an attention exchange heads for parts of the sequence.

        Where it is called as a cross-attention, it projects a slice of the encoder's sequence, [batch, memory, hidden],
        which is whole on every rank. T5's, which make a bias of relative positions, make that of whole sequences.
        """
        attention.sequence_exchange = self
        if hasattr(attention, "compute_bias"):
            attention.compute_bias = _bias_of_sequence.__get__(attention)

        def cut(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            name = next((name for name in _MEMORY if kwargs.get(name) is not None), None)
            self.memory_length = None if name is None else kwargs[name].shape[1]
            return args, kwargs if name is None else {**kwargs, name: self.region.split(kwargs[name])}

        attention.register_forward_pre_hook(cut, with_kwargs=True)

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, heads, seq/tp, head_dim] -> [batch, heads/tp, seq, head_dim], without padding.

        Key/value heads fewer than ranks are repeated, so that every rank gets one.
        """
        size, length = self.region.world_size, self.region.length
        of_keys = length if self.memory_length is None else self.memory_length

        def exchanged(x: Tensor, tokens: int) -> Tensor:
            return all_to_all(repeated_for(x, size), 1, 2, self.region.group)[:, :, :tokens]

        return exchanged(query, length), exchanged(key, of_keys), exchanged(value, of_keys)

    @property
    def rank(self) -> int:
        """Number of this rank among those that exchange: it attends with the heads of that number."""
        return dist.get_rank(self.region.group)

    def own_heads(self, bias: Tensor | None, heads: int) -> Tensor | None:
        """Return the part of a bias [batch, all heads or 1, queries, keys] for this rank's `heads`."""
        if bias is None or bias.dim() < 4 or bias.shape[1] in (1, heads):
            return bias
        return bias.narrow(1, self.rank * heads, heads)

    def to_sequence(self, found: Tensor) -> Tensor:
        """Exchange attention output back: [batch, seq, heads/tp, head_dim] -> [batch, seq/tp, heads, head_dim]."""
        return all_to_all(pad_dim(found, 1, self.region.world_size), 1, 2, self.region.group)


def _bias_of_sequence(self: nn.Module, query_length: int, key_length: int, **options: Any) -> Tensor:
    """Compute T5's position bias, [1, heads, seq, seq], in a layer whose hidden states are a slice of a sequence."""
    length = self.sequence_exchange.region.length
    return type(self).compute_bias(self, length, length, **options)


def repeated_for(x: Tensor, size: int) -> Tensor:
    """Repeat heads of [batch, heads, ...] that are fewer than `size`, so that every rank gets one."""
    return x if x.shape[1] % size == 0 else x.repeat_interleave(size // x.shape[1], 1)
