"""Language-model head sharded over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.cross_entropy.deferred_logits import LMHeadCall, defer_logits
from shardformer.layers.linear import ColumnParallelLinear
from shardformer.matmul.weight_grad import is_native_linear


class VocabParallelLMHead(ColumnParallelLinear):
    """Language-model head whose vocabulary is sharded over the tensor-parallel axis.

    Input: [batch, seq, hidden]. Output: gathered logits [batch, seq, vocabulary]; inside `parallel_logits`, this rank's
    [batch, seq, padded vocabulary / ranks], for a loss that reads sharded logits.
    """

    shards_layer = False

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: ProcessGroup, *, divisible_by: int = 1, **kwargs: Any
    ) -> VocabParallelLMHead:
        """Shard the native head; the vocabulary is padded like that of its embedding."""
        column = ColumnParallelLinear.from_native_module(
            module, process_group, divisible_by=divisible_by, gather_output=True, **kwargs
        )
        return VocabParallelLMHead(
            column.weight, column.bias, process_group, transposed=column.transposed, gather_output=True
        )

    @staticmethod
    def keep_whole(module: nn.Module, process_group: ProcessGroup, **kwargs: Any) -> None:
        pass  # the logits are gathered

    @property
    def vocab_range(self) -> tuple[int, int]:
        """Return first and end row of the vocabulary on this rank."""
        start, stop, _ = self.weight.shard_spec.pieces()[0]
        return start, stop


@contextmanager
def parallel_logits(model: nn.Module) -> Iterator[None]:
    """Let the heads of `model` return their own shards of the logits."""
    heads = [module for module in model.modules() if isinstance(module, VocabParallelLMHead)]
    for head in heads:
        head.gather_output = False
    try:
        yield
    finally:
        for head in heads:
            head.gather_output = True


@contextmanager
def deferred_logits(model: nn.Module) -> Iterator[None]:
    """Enter `parallel_logits`, and defer logits to the loss if nothing else reads them and that saves memory."""
    forwards = {head: vars(head).get("forward") for head in _deferring_heads(model)}
    for head in forwards:
        head.forward = partial(_defer, head, head.forward)
    try:
        with parallel_logits(model):
            yield
    finally:
        for head, forward in forwards.items():
            if forward is None:
                del head.forward
            else:
                head.forward = forward


def _deferring_heads(model: nn.Module) -> list[nn.Module]:
    """Return the heads of `model` that compute only x W^T + b."""
    heads = {}
    for module in model.modules():
        if isinstance(module, VocabParallelLMHead):
            shares = module._shared_input is not None or module.input_is_gathered or not module.adds_bias
            if type(module).forward is ColumnParallelLinear.forward and "forward" not in vars(module) and not shares:
                heads[module] = None
        elif callable(getattr(module, "get_output_embeddings", None)):
            head = _output_embeddings(module)
            if head is not None and is_native_linear(head):
                heads[head] = None
    return list(heads)


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # a transformers base model has no head
        return None


def _defer(head: nn.Module, forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    if isinstance(head, VocabParallelLMHead):
        # This rank's shard of the logits, whenever they are read.
        return defer_logits(LMHeadCall(hidden, head.matrix, head.bias, head.project, head.vocab_range, head.group))
    return defer_logits(LMHeadCall(hidden, head.weight, head.bias, forward))
