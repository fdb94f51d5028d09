"""Embeddings sharded by rows (a vocabulary) or by columns of heads, checks of their ids, and heads of a vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup

from shardformer.cross_entropy.fused_linear import LMHeadCall, defer_logits
from shardformer.distributed.blocks import blocks_of, num_parts, split_parameter
from shardformer.distributed.collectives import reduce_from_region
from shardformer.layers.linear import ColumnParallelLinear, column_layer
from shardformer.layers.parallel_module import Linear, ParallelModule
from shardformer.matmul.kernel import embedding
from shardformer.matmul.native import Native
from shardformer.shard_spec import Part, ShardSpec, pad_to_multiple, shard_parameter
from shardformer.utils.derived_modules import derive, stored_weight
from shardformer.utils.module_paths import remembered


class OutOfVocabularyError(IndexError):
    """Index outside of a vocabulary; a subclass of the IndexError that torch raises in this case.

    Args:
        value: the index.
        size: rows of the vocabulary, without padding.
        kind: "token id" or "label".
        entry: batch entry that holds the index, and position in it; empty if not known.
    """

    def __init__(self, value: int, size: int, kind: str, entry: str = "") -> None:
        self.value, self.size, self.kind, self.entry = value, size, kind, entry
        where = f" in {entry}" if entry else ""
        ignored = ", or -100 for a label that does not count" if kind == "label" else ""
        super().__init__(f"{kind} {value}{where} is outside of the vocabulary of {size}; use 0 to {size - 1}{ignored}")


def check_indices(indices: Tensor, size: int, kind: str, ignored: int | None = None) -> None:
    """Check that `indices` are rows of a vocabulary.

    On a GPU this is an assertion on the device, as in torch's own embedding and loss, so it does not synchronize.

    Args:
        indices: [...], the same on all ranks of the axis over which the vocabulary is sharded.
        size: rows of the vocabulary, without padding.
        kind: what the indices are, for the message.
        ignored: an index value that is always allowed, such as -100.

    Raises:
        OutOfVocabularyError: an index is negative or too large.
    """
    if indices.is_meta or isinstance(indices, FakeTensor):
        return
    outside = (indices < 0) | (indices >= size)
    if ignored is not None:
        outside &= indices != ignored
    if indices.device.type == "cpu" and not torch.compiler.is_compiling():
        if outside.any():
            raise OutOfVocabularyError(int(indices[outside][0]), size, kind)
    elif indices.device.type in ("cpu", "cuda"):
        torch._assert_async(~outside.any(), f"a {kind} is outside of the vocabulary of {size}")


class VocabParallelEmbedding(ParallelModule):
    """Embedding whose rows are sharded over the tensor-parallel axis.

    Input: token ids [batch, seq]. Output: [batch, seq, hidden], the same on every rank: each rank looks up the ids in
    its own range, and an all-reduce sums the results. A vocabulary size that the number of ranks does not divide is
    padded with zero rows that no id reaches: an id outside of the vocabulary is refused, as by the native layer.

    Args:
        weight: local rows [padded vocabulary / ranks, hidden].
    """

    can_stay_whole = True

    def __init__(self, native: nn.Embedding, weight: nn.Parameter, group: ProcessGroup) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = (native.num_embeddings, native.embedding_dim)
        self.padding_idx = native.padding_idx
        # Adapters of an embedding read these.
        self.max_norm, self.norm_type = native.max_norm, native.norm_type
        self.scale_grad_by_freq, self.sparse = native.scale_grad_by_freq, native.sparse
        self.weight, self.group = weight, group
        self.first_row, self.end_row, _ = weight.shard_spec.pieces()[0]

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: ProcessGroup, *, divisible_by: int = 1
    ) -> VocabParallelEmbedding:
        """Shard an `nn.Embedding` by rows, padded to `divisible_by` times the ranks; TypeError for others."""
        options = ("max_norm", "scale_grad_by_freq", "sparse")
        if not isinstance(module, nn.Embedding) or any(getattr(module, name) for name in options):
            raise TypeError(
                f"{type(module).__name__} cannot be cut by rows; name an nn.Embedding without {', '.join(options)}"
            )
        rank, world_size = (dist.get_rank(process_group), dist.get_world_size(process_group))
        part = Part(
            module.num_embeddings,
            padded_size=pad_to_multiple(module.num_embeddings, divisible_by * num_parts(process_group)),
        )
        spec = ShardSpec(tuple(module.weight.shape), 0, (part,), rank, world_size)
        local = VocabParallelEmbedding(module, shard_parameter(module.weight, spec), process_group)
        return local if type(module).forward is nn.Embedding.forward else _keep_forward(module, local)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids [batch, seq]: [batch, seq, hidden]."""
        check_indices(ids, self.num_embeddings, "token id")
        elsewhere = (ids < self.first_row) | (ids >= self.end_row)
        local_ids = (ids - self.first_row).masked_fill(elsewhere, 0)
        out = embedding(local_ids, self.weight, self._local_padding_idx())
        out = reduce_from_region(out.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)
        # The sum is exact, but for -0 + 0 = 0.
        return out if blocks_of(self.group) is None else out + 0.0

    def _local_padding_idx(self) -> int | None:
        """Return the local index of the padding row if it is on this rank; its gradient is zero, as natively."""
        if self.padding_idx is None or not self.first_row <= self.padding_idx < self.end_row:
            return None
        return self.padding_idx - self.first_row

    def extra_repr(self) -> str:
        """Describe the shard for `repr`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, rows={self.first_row}:{self.end_row}"


class HeadParallelEmbedding(ParallelModule):
    """Table of biases, [positions, heads], of which a rank has its heads: indices [...] -> [..., local heads]."""

    shards_layer = True
    can_stay_whole = True

    def __init__(self, weight: nn.Parameter, group: ProcessGroup) -> None:
        super().__init__()
        self.weight, self.blocks = weight, blocks_of(group)
        self._slices = None if self.blocks is None else self.blocks.slices(weight.shard_spec)

    @staticmethod
    def from_native_module(module: nn.Module, process_group: ProcessGroup) -> HeadParallelEmbedding:
        """Shard the columns of an `nn.Embedding`."""
        positions, heads = module.weight.shape
        rank, world_size = (dist.get_rank(process_group), dist.get_world_size(process_group))
        spec = ShardSpec((positions, heads), 1, (Part(heads),), rank, world_size)
        return HeadParallelEmbedding(shard_parameter(module.weight, spec), process_group)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids [batch, seq]: [batch, seq, hidden]."""
        if self.blocks is not None:
            return F.embedding(ids, split_parameter(self.weight, 1, self._slices, self.blocks))
        return embedding(ids, self.weight)


class _LocalLookup(nn.Embedding):
    """Local lookup that an embedding class with its own forward calls as `super().forward(ids)`."""

    def forward(self, ids: Tensor) -> Tensor:
        return VocabParallelEmbedding.forward(self, ids)

    _local_padding_idx = VocabParallelEmbedding._local_padding_idx
    extra_repr = VocabParallelEmbedding.extra_repr


def _keep_forward(native: nn.Embedding, local: VocabParallelEmbedding) -> nn.Embedding:
    """Keep the own forward of an embedding class that scales its output (Gemma) around the lookup of local rows."""
    cls = type(type(native).__name__, (type(native), _LocalLookup), {})
    kept = cls.__new__(cls)
    rows = {"group": local.group, "first_row": local.first_row, "end_row": local.end_row}
    vars(kept).update(vars(native), _parameters={"weight": local.weight}, **rows)
    return kept


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
