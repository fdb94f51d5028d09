"""Language-model head sharded over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.cross_entropy.fused_linear import LMHeadCall, defer_logits
from shardformer.layers.linear import ColumnParallelLinear, column_layer
from shardformer.layers.replicated_linear import Linear
from shardformer.matmul.native import Native
from shardformer.utils.derived_modules import derive, stored_weight
from shardformer.utils.module_paths import remembered


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
        """Shard the native head; the vocabulary is padded like that of its embedding, with rows of zeros."""
        options = {"divisible_by": divisible_by, "gather_output": True, **kwargs}
        return column_layer(VocabParallelLMHead, module, process_group, **options)

    @staticmethod
    def keep_whole(module: nn.Module, process_group: ProcessGroup, **kwargs: Any) -> None:
        """Prepare a head whose weight stays whole on every rank."""
        pass  # the logits are gathered

    @property
    def vocab_range(self) -> tuple[int, int]:
        """Return first and end row of the vocabulary on this rank."""
        start, stop, _ = self.features.pieces()[0]
        return start, stop


class GatheredLMHead(ColumnParallelLinear):
    """Language-model head whose logits are gathered at once, for a model that changes them: a bias, a scale."""

    shards_layer = False


@contextmanager
def parallel_logits(model: nn.Module) -> Iterator[None]:
    """Let the heads of `model` return their own shards of the logits."""
    heads = remembered(model, parallel_heads)
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
    deferring = {head: derive(head, methods) for head, methods in _deferring_heads(model).items()}
    places = [(parent, name, head) for parent, name, head in remembered(model, _places_of_heads) if head in deferring]
    for parent, name, head in places:
        parent._modules[name] = deferring[head]
    try:
        with parallel_logits(model):
            yield
    finally:
        for parent, name, head in places:
            parent._modules[name] = head


class _DeferringHead(nn.Module):
    """Head with the whole vocabulary that defers its logits."""

    def forward(self, hidden: Tensor) -> Tensor:
        return defer_logits(LMHeadCall(hidden, self.weight, self.bias, super().forward))


class _DeferringParallelHead(nn.Module):
    """Head with a shard of the vocabulary that defers this rank's shard of the logits, whenever they are read."""

    def forward(self, hidden: Tensor) -> Tensor:
        return defer_logits(LMHeadCall(hidden, self.matrix, self.bias, self.project, self.vocab_range, self.group))


def parallel_heads(model: nn.Module) -> list[VocabParallelLMHead]:
    """Return the heads of a model that have a part of the vocabulary."""
    return [module for module in model.modules() if isinstance(module, VocabParallelLMHead)]


def _modules_with_heads(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are heads, or that say which one theirs is."""
    return [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelLMHead) or callable(getattr(module, "get_output_embeddings", None))
    ]


def _places_of_heads(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return where the heads of `model` are: parent, name there, head."""
    heads = {*parallel_heads(model), *map(_output_embeddings, _modules_with_heads(model))} - {None}
    return [
        (parent, name, child) for parent in model.modules() for name, child in parent._modules.items() if child in heads
    ]


def _deferring_heads(model: nn.Module) -> dict[nn.Module, type[nn.Module]]:
    """Return the heads of `model` that compute only x W^T + b, with the methods that defer their logits."""
    heads: dict[nn.Module, type[nn.Module]] = {}
    for module in remembered(model, _modules_with_heads):
        if isinstance(module, VocabParallelLMHead):
            shares = module._shared_input is not None or module.input_is_gathered or not module.adds_bias
            shares = shares or type(module.kernel) is not Native
            if type(module).forward is ColumnParallelLinear.forward and "forward" not in vars(module) and not shares:
                heads[module] = _DeferringParallelHead
        else:
            head = _output_embeddings(module)
            is_native = head is not None and type(head).forward in (nn.Linear.forward, Linear.forward)
            if is_native and "forward" not in vars(head) and stored_weight(head) is not None:
                heads[head] = _DeferringHead
    heads.pop(model, None)  # a model that is one head keeps its identity
    return heads


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # a transformers base model has no head
        return None
