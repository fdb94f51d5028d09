"""The language-model head, cut over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from shardformer.layers.linear import ColumnParallelLinear


class VocabParallelLMHead(ColumnParallelLinear):
    """Logits over the vocabulary, cut over the tensor-parallel axis.

    Input: [batch, seq, hidden]. Output: [batch, seq, vocabulary], gathered, or, inside `parallel_logits`, this rank's
    [batch, seq, padded vocabulary / ranks], for a loss that reads logits where they lie.
    """

    cuts_layer = False

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: ProcessGroup, *, divisible_by: int = 1, **kwargs: Any
    ) -> VocabParallelLMHead:
        """Share out the native head; the vocabulary is padded like its embedding's."""
        column = ColumnParallelLinear.from_native_module(
            module, process_group, divisible_by=divisible_by, gather_output=True, **kwargs
        )
        return VocabParallelLMHead(
            column.weight, column.bias, process_group, transposed=column.transposed, gather_output=True
        )

    @property
    def vocab_range(self) -> tuple[int, int]:
        """First and end row of the vocabulary on this rank."""
        start, stop, _ = self.weight.shard_spec.pieces()[0]
        return start, stop


@contextmanager
def parallel_logits(model: nn.Module) -> Iterator[None]:
    """Let the heads of `model` return their own part of the logits."""
    heads = [module for module in model.modules() if isinstance(module, VocabParallelLMHead)]
    for head in heads:
        head.gather_output = False
    try:
        yield
    finally:
        for head in heads:
            head.gather_output = True
