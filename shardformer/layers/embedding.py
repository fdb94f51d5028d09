"""Embeddings sharded by rows (a vocabulary) or by columns that belong to heads, and range checks of their ids."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup

from shardformer.distributed.blocks import blocks_of, num_parts, split_parameter
from shardformer.distributed.collectives import reduce_from_region
from shardformer.layers.parallel_module import ParallelModule
from shardformer.matmul.kernel import embedding
from shardformer.shard_spec import Part, ShardSpec, pad_to_multiple, shard_parameter


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
        native: the native embedding, for its options.
        weight: local rows [padded vocabulary / ranks, hidden].
        group: process group of the axis.
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
        """Shard an `nn.Embedding`; rows are padded to a multiple of `divisible_by` times the number of ranks.

        Raises:
            TypeError: not an `nn.Embedding`, or one with an option that does not survive sharding by rows.
        """
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
    """Table of biases, [positions, heads]; each rank holds the columns of its heads.

    Input: indices [...]. Output: [..., local heads].
    """

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
