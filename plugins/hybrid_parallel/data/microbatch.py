"""A batch and its micro-batches: how many there are, where they are cut, and the dtypes of their entries.

A batch that is one row of packed documents cannot be cut along its samples. It is cut where documents start, which do
not see each other: the parts give the same outputs, and the sums of their losses are the sum of the row if no label
crosses a cut.

A batch does not say which entries are labels, rewards or weights, and some models reconstruct their own images. So
nothing is cast ahead of the model: a layer in 16 bits casts an input whose dtype it would refuse.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, is_dataclass
from functools import partial, reduce
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from booster.data.rows import ATTENTION_LENGTH, attention_length_of, cost_of, cuts_of, is_shared, num_rows, sample_dim
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.media import parts_of_media, without_media
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh
from shardformer.attention.packed_documents import asks_for_cache, document_starts, may_be_packed
from shardformer.distributed.blocks import joined_blocks
from shardformer.layers.norm import FusedLayerNorm
from shardformer.loss.terms import IGNORE_INDEX, SHIFTED, HeadLoss, zero_of
from shardformer.matmul.native import MatmulLayer

# Entries that may have several rows for each sample, those of one sample in a row: the codebooks of Dia's labels, the
# documents of RAG's contexts.
_SEVERAL_ROWS = ("labels", "context_input_ids", "context_attention_mask")


def next_batch(batches: Any) -> Any:
    """Return the next batch of an iterator, or raise StopIteration; a mapping is itself a batch."""
    if isinstance(batches, Mapping):
        return batches
    if isinstance(batches, Iterator):
        try:
            return next(batches)
        except StopIteration:
            raise StopIteration(
                "execute_pipeline got an iterator that is at its end, or that of a loader without batches; make "
                "iter(dataloader) once an epoch, and call execute_pipeline len(dataloader) times"
            ) from None
    kind = type(batches).__name__
    raise ConfigurationError(
        f"execute_pipeline takes a batch from an iterator, and was given a {kind}; "
        "give it iter(dataloader), made once an epoch, or the batch itself, a mapping"
    )


def as_batch(value: Any) -> dict[str, Any]:
    """Return a batch as keyword arguments of the model."""
    if isinstance(value, Mapping):
        ids = value.get("input_ids")
        if ids is not None and not (isinstance(ids, Tensor) and not ids.is_floating_point()):
            what = f"is of {ids.dtype}" if isinstance(ids, Tensor) else f"is a {type(ids).__name__}"
            raise ConfigurationError(f"input_ids of the batch {what}; give a tensor of integers, as torch.tensor(ids)")
        return dict(value)
    raise ConfigurationError(
        f"a batch is a {type(value).__name__}; use a mapping of the model's keyword arguments to tensors"
    )


def split_batch(
    batch: Mapping[str, Any],
    num_microbatches: int,
    cuts: Sequence[int] | None = None,
    tokens: Mapping[str, int] = MappingProxyType({}),
    rows: int | None = None,
) -> list[dict[str, Any]]:
    """Split the samples into parts whose sizes differ by at most one; what all samples share goes to every part.

    Tuples and mappings are split as what they hold; a list with an item for each sample is split along its items.

    Args:
        cuts: [parts + 1] token indices at which a batch of one row is cut instead.
        tokens: of images and sounds, see `media_tokens`.
        rows: samples of the batch, if the caller knows.

    Raises:
        ConfigurationError: an entry has neither a row for each sample nor is shared by all, or lists images or sounds
            and not to which samples they belong.
    """
    if num_microbatches < 2:
        return [dict(batch)] * num_microbatches
    if cuts is not None:
        return [
            {name: _tokens(value, *pair, cuts[-1]) for name, value in batch.items()}
            for pair in itertools.pairwise(cuts)
        ]
    rows = num_rows(batch) if rows is None else rows
    parts: list[dict[str, Any]] = [{} for _ in range(num_microbatches)]
    media = parts_of_media(batch, rows, num_microbatches, tokens)
    for key, value in batch.items():
        pieces = _labels_of_masked(batch, num_microbatches) if key == "labels" else media.get(key)
        for part, piece in zip(parts, pieces or _pieces(key, value, rows, num_microbatches), strict=True):
            if piece is not None or key not in media:
                part[key] = piece
    return parts


def has_tokens(value: Any, length: int) -> bool:
    """Return whether an entry of a batch of one row has a value for each of its `length` tokens, [1, length, ...]."""
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[0] == 1 and value.shape[1] == length


def _tokens(value: Any, start: int, end: int, length: int) -> Any:
    return value[:, start:end] if has_tokens(value, length) else value


def _pieces(path: str, value: Any, rows: int, num_pieces: int) -> Sequence[Any]:
    """Return an entry's part for each micro-batch; refuses tensors with neither a row a sample nor shared ones."""
    name = path.rpartition(".")[2]
    if isinstance(value, Tensor):
        dim = _sample_dim(name, value, rows)
        if dim is not None:
            return value.tensor_split(num_pieces, dim=dim)
        if _has_several_rows(name, value, rows):
            pieces = value.unflatten(0, (rows, -1)).tensor_split(num_pieces)
            return [piece.flatten(0, 1) for piece in pieces]
        if is_shared(name, value) or len(value) == 1:
            return [value] * num_pieces
        raise _uncut(path, f"has {len(value)} rows", rows)
    if _is_list_of_samples(name, value, rows):
        ends = torch.arange(rows).tensor_split(num_pieces)
        return [_like(value, [value[row] for row in piece.tolist()]) for piece in ends]
    inner = inner_values(value)
    if inner and _holds_tensors(value):
        parts = [_pieces(f"{path}{mark}", each, rows, num_pieces) for mark, each in inner.items()]
        return [_like(value, list(each)) for each in zip(*parts, strict=True)]
    if not inner and _holds_tensors(value):
        raise _uncut(path, f"is a {type(value).__name__}", rows)
    return [value] * num_pieces


def _uncut(path: str, what: str, rows: int) -> ConfigurationError:
    return ConfigurationError(
        f"{path} of the batch {what}, and the batch {rows} samples, so that micro-batches cannot take their parts of "
        "it; give it a row for each sample, or [1, ...] if all share it, or use num_microbatches=1"
    )


def inner_values(value: Any) -> dict[str, Any]:
    """Return what a mapping, tuple or list holds: how it is reached -> value; of anything else nothing."""
    if isinstance(value, Mapping):
        return {f".{name}": each for name, each in value.items()}
    return {f"[{index}]": each for index, each in enumerate(value)} if isinstance(value, tuple | list) else {}


def _like(value: Any, inner: list[Any]) -> Any:
    """Return a mapping, tuple or list of the kind of `value` with other inner values, in the same order."""
    if isinstance(value, Mapping):
        made = dict(zip(value, inner, strict=True))
        if is_dataclass(value):
            return type(value)(**made)
        copied = copy(value) if isinstance(value, MutableMapping) else {}
        copied.update(made)
        return copied
    return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)


def _holds_tensors(value: Any, depth: int = 4) -> bool:
    """Return whether there are tensors in a value, or in attributes of an object, as those of a cache."""
    if isinstance(value, Tensor):
        return True
    inner = inner_values(value) or ({} if callable(value) else getattr(value, "__dict__", {}))
    return depth > 0 and any(_holds_tensors(each, depth - 1) for each in inner.values())


def _is_list_of_samples(name: str, value: Any, rows: int) -> bool:
    """Return whether a list, or a tuple, has something of each sample, as the targets of a detector."""
    if not isinstance(value, list | tuple) or len(value) != rows or hasattr(value, "_fields"):
        return False
    return isinstance(value, list) or (_holds_tensors(value) and not _has_samples(name, value, rows))


def _has_samples(name: str, value: Any, rows: int) -> bool:
    """Return whether all tensors in a value have a row for each sample, or are shared; mappings are of one sample."""
    if isinstance(value, Tensor):
        return _sample_dim(name, value, rows) is not None or is_shared(name, value)
    return not isinstance(value, Mapping) and all(
        _has_samples(name, each, rows) for each in inner_values(value).values()
    )


def _labels_of_masked(batch: Mapping[str, Any], num_pieces: int) -> list[Tensor] | None:
    """Return each part's labels if they are a list, of the masked patches of all samples (BEiT); None for others."""
    labels, masked = batch["labels"], batch.get("bool_masked_pos")
    if not isinstance(labels, Tensor) or not isinstance(masked, Tensor) or (labels.dim(), masked.dim()) != (1, 2):
        return None
    counts = [int(part.sum()) for part in masked.bool().tensor_split(num_pieces)]
    return list(labels.split(counts)) if sum(counts) == len(labels) else None


def _sample_dim(name: str, value: Any, rows: int) -> int | None:
    """Return the sample dim of an entry; None if it has none."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    dim = sample_dim(name, value)
    return dim if value.shape[dim] == rows else None


def _has_several_rows(key: str, value: Tensor, rows: int) -> bool:
    return key in _SEVERAL_ROWS and value.dim() > 1 and rows > 0 and value.shape[0] % rows == 0


def stand_in(
    batch: Mapping[str, Any], tokens: Mapping[str, int] = MappingProxyType({}), rows: int = 0
) -> dict[str, Any]:
    """Return zeros for an empty share, all visible, positions from 0, without media (`tokens`)."""

    def sample(name: str, value: Any) -> Any:
        if isinstance(value, list) and len(value) == rows:  # entries of single samples, as the targets of a detector
            return []
        if not isinstance(value, Tensor):
            inner = inner_values(value)
            is_list = isinstance(value, list)
            return value if is_list or not inner else _like(value, [sample(key[1:], inner[key]) for key in inner])
        dim = _sample_dim(name, value, rows)
        if dim is None:
            is_flat = _has_several_rows(name, value, rows)
            return value.new_zeros(len(value) // rows, *value.shape[1:]) if is_flat else value
        # A script may pad no samples to no width, which layers accept as little.
        shape = (*value.shape[:dim], 1, *(size or 1 for size in value.shape[dim + 1 :]))
        if name == "position_ids" and value.dim() > 1:  # zeros would be a document for each token
            return torch.arange(shape[-1], device=value.device).expand(shape)
        return value.new_full(shape, int("mask" in name))

    return {name: sample(name, value) for name, value in without_media(batch, tokens).items()}


def without_rows(nested: Any, rows: int | None = None) -> Any:
    """Return a batch, or outputs, without samples; `rows`: of samples whose lists are then empty; None keeps them."""
    if isinstance(nested, Tensor):
        return nested[:0] if nested.dim() else nested
    inner = inner_values(nested)
    is_list = isinstance(nested, list | tuple) and not hasattr(nested, "_fields") and len(nested) == rows
    if is_list and not all(isinstance(each, Tensor) and each.dim() and len(each) == rows for each in nested):
        return type(nested)()
    if inner:
        return _like(nested, [without_rows(each, rows) for each in inner.values()])
    if rows is None or not _holds_tensors(nested):
        return nested
    made = copy(nested)  # an object of the user's own class
    vars(made).update({name: without_rows(value, rows) for name, value in vars(nested).items()})
    return made


def nothing_of(outputs: Any) -> Tensor:
    """Return a zero (0-d) that depends on all outputs, so that its backward pass goes through the whole model."""
    values = outputs.values() if isinstance(outputs, Mapping) else [outputs]
    return sum(
        zero_of(joined_blocks(value, -1)) for value in values if isinstance(value, Tensor) and value.is_floating_point()
    )


def signature(batch: Mapping[str, Any]) -> tuple:
    """Return what determines the shapes of a stage's activations; neighbouring stages compute the same."""

    def shapes(value: Any) -> tuple | None:
        if isinstance(value, Tensor):
            return tuple(value.shape)
        return tuple(map(shapes, inner_values(value).values())) or None

    return tuple((key, shapes(value)) for key, value in batch.items())


def to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Move tensors to `device`, also those in tuples, lists and mappings."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=True)
        if not _holds_tensors(value) or not (inner := inner_values(value)):
            return value
        return _like(value, [move(each) for each in inner.values()])

    return {key: move(value) for key, value in batch.items()}


MANY = 2**62  # more samples than any batch has


def agreed_microbatches(rows: int, count: Callable[[int, int], int], mesh: HybridMesh) -> int:
    """Agree on one number of micro-batches, since ranks wait for one another at the experts of every layer.

    Every share of the batch that is not empty has at least that many samples.

    Args:
        count: (samples, stages) -> number of micro-batches that one rank alone would use.
    """
    # On the CPU: reading the result must not wait for the device.
    extremes = torch.tensor([rows or MANY, -rows])
    dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=mesh.group(DP_CP))
    fewest, most = int(extremes[0]), -int(extremes[1])
    return min(count(most, mesh.size("pp")), fewest) if most else 0


@dataclass(frozen=True)
class PackedRow:
    """A row of packed documents."""

    borders: tuple[int, ...]  # where documents start, and the number of tokens of the row

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(self.borders) - 1

    def cuts(self, parts: int, hidden_size: int | None) -> list[int]:
        """Return [parts + 1] indices between documents, of nearly equal cost; `hidden_size`: None if unknown."""
        per_token = ATTENTION_LENGTH if hidden_size is None else attention_length_of(hidden_size)
        lengths = [end - start for start, end in itertools.pairwise(self.borders)]
        return [self.borders[index] for index in cuts_of([cost_of(each, per_token) for each in lengths], parts)]


def packed_row(batch: Mapping[str, Any], head_loss: HeadLoss, has_labels: bool = True) -> PackedRow | None:
    """Return documents of a batch, on the host if it is not to wait, to cut between; None if it stays whole."""
    if not may_be_packed(batch) or asks_for_cache(batch) or not head_loss.per_token:
        return None
    positions = batch["position_ids"]
    tensors = [value for value in batch.values() if isinstance(value, Tensor) and value.dim()]
    if positions.dim() != 2 or not all(has_tokens(value, positions.shape[1]) for value in tensors):
        return None
    starts = document_starts(positions)[0].nonzero()[:, 0]
    labels = head_loss.token_labels(batch) if has_labels else []
    if any(_crosses(each, batch, starts[1:] - 1) for each in labels):
        return None
    return PackedRow((*starts.tolist(), positions.shape[1]))


def _crosses(labels: Tensor, batch: Mapping[str, Any], lasts: Tensor) -> bool:
    """Return whether a label [1, seq] of a document's last token is the next document's first token."""
    given = [batch[name] for name in ("labels", SHIFTED) if isinstance(batch.get(name), Tensor)]
    if any(labels is each for each in given):
        return False
    return bool((labels[0, lasts] != IGNORE_INDEX).any())


_SHORT = (torch.bfloat16, torch.float16)
# Layers that take inputs of the dtype of their weights alone. An RMS norm multiplies in the wider dtype of the two.
_LAYERS = (
    *(nn.Linear, nn.Bilinear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, MatmulLayer),
    *(nn.LayerNorm, nn.GroupNorm, _NormBase, nn.PReLU, FusedLayerNorm),
)
# Losses that take inputs of one dtype alone: their backward pass raises for two; the first one's until torch 2.12.
_LOSSES = (F.mse_loss, F.huber_loss, F.binary_cross_entropy)
# Entries that stand for what a model computes itself: they have the dtype of its activations.
_ACTIVATIONS = (
    *("inputs_embeds", "decoder_inputs_embeds", "encoder_hidden_states"),
    *("attention_mask", "decoder_attention_mask", "encoder_attention_mask", "cross_attention_mask"),
)


def has_floats(value: Any) -> bool:
    """Return whether an entry of a batch is, or holds, a floating-point tensor."""
    if isinstance(value, Mapping):
        return any(map(has_floats, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_floats, value))
    return isinstance(value, Tensor) and value.is_floating_point()


# ----- inputs -----


def cast_inputs(modules: Iterable[nn.Module], model: nn.Module, dtype: torch.dtype) -> None:
    """Have the layers among a model's modules, if their weights have 16 bits, cast inputs of another dtype.

    Models of transformers cast what stands for their activations; one inside of another may be given embeddings that
    are made of entries. Of a layer class of the user's own, which has a matrix `weight`, the first input is cast. What
    a module multiplies by a parameter outside of any layer is left as in plain PyTorch.

    Args:
        dtype: of the model's activations.
    """
    for layer in modules:
        is_known = isinstance(layer, _LAYERS) or type(layer).__name__ == "Conv1D"
        param = next(layer.parameters(), None) if is_known or (layer is not model and _is_users_layer(layer)) else None
        if param is not None and param.dtype in _SHORT:
            layer.register_forward_pre_hook(partial(_cast_inputs, param.dtype, is_known), with_kwargs=True)
        elif dtype in _SHORT and hasattr(layer, "get_input_embeddings"):
            layer.register_forward_pre_hook(partial(_cast_activations, dtype), with_kwargs=True)


def _is_users_layer(module: nn.Module) -> bool:
    """Return whether a module is a layer of a class of the user's own; those of transformers cast what they must."""
    weight = module._parameters.get("weight")
    is_leaf = weight is not None and weight.dim() > 1 and not module._modules
    return is_leaf and not type(module).__module__.startswith("transformers.")


def _cast_inputs(
    dtype: torch.dtype, all_of_them: bool, layer: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    if not all_of_them:
        return (*_in_dtype(args[:1], dtype), *args[1:]), kwargs
    return _in_dtype(args, dtype), {name: _in_dtype(each, dtype) for name, each in kwargs.items()}


def _cast_activations(
    dtype: torch.dtype, model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    return args, {name: _in_dtype(each, dtype) if name in _ACTIVATIONS else each for name, each in kwargs.items()}


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    if type(value) is tuple:  # arguments, and the states of an LSTM
        return tuple(_in_dtype(each, dtype) for each in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


# ----- losses -----


class LossesPromote(TorchFunctionMode):
    """A context in which losses that take inputs of one dtype alone compute in the widest of those that they get."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if function in _LOSSES:
            dtypes = [each.dtype for each in (*args, *kwargs.values()) if has_floats(each)]
            dtype = reduce(torch.promote_types, dtypes)
            args, kwargs = _in_dtype(args, dtype), {name: _in_dtype(each, dtype) for name, each in kwargs.items()}
        return function(*args, **kwargs)
