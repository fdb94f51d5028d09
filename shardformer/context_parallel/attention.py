"""Attention over sequences that are sharded over the context-parallel axis.

Like `shardformer.attention.registry`, this module adds entries to transformers' attention and mask registries. The
mask that the model builds once per pass is not a tensor [batch, 1, seq, seq] but a `PendingMask`. It knows the pass
and computes masks block by block; it is passed to the layers instead of the tensor. A layer that is recomputed receives
it again, and so sees its own pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.attention.packed_documents import window_of
from shardformer.attention.registry import kernel_named, masks_of, routed_modules, with_own_sinks
from shardformer.context_parallel.ring import Block, Softmax, repeated, ring_attention
from shardformer.context_parallel.zigzag import ContextParallelPass, ZigzagSharding
from shardformer.distributed.collectives import all_to_all
from shardformer.distributed.sequence_parallel import first_output, repeated_for
from shardformer.matmul.kernel import autocast

PREFIX = "context_"
RING, ALL_TO_ALL = "ring_attn", "all_to_all"


class Span(NamedTuple):
    """Tokens of a row that share keys: queries `start` to `stop` see the keys `start` to `keys`, up to themselves."""

    start: int
    keys: int
    stop: int


def blocks_of_span(queries: range, keys: range, window: int | None) -> Iterator[Block]:
    """Yield blocks without masks in which queries see the keys up to themselves, and `window` of them at most.

    Blocks are squares, causal or flipped, and rectangles; each pair is in one. Queries are cut where keys begin and
    end, and where the window leaves them, into tiles of at most `window`.

    Args:
        queries, keys: places in the sequence; `Block` has the same.
        window: keys that a query sees, itself among them; None for all.
    """
    window = window or queries.stop + len(queries) + len(keys)
    edges = {keys.start, keys.stop, keys.start + window - 1, keys.stop + window - 1}
    cuts = sorted({queries.start, queries.stop, *(edge for edge in edges if edge in queries)})
    for begin, end in pairwise(cuts):
        for start in range(begin, end, window):
            stop = min(start + window, end)
            first, last = max(stop - window, keys.start), min(start, keys.stop)
            if first < last:
                yield Block(slice(start, stop), slice(first, last))
            if keys.start <= start < keys.stop:
                yield Block(slice(start, stop), slice(start, stop), is_causal=True)
            far = start - window + 1
            if stop - start > 1 and keys.start <= far < keys.stop:
                yield Block(slice(start, stop - 1), slice(far, stop - window), is_causal=True, is_flipped=True)


class ContextMask:
    """Attention mask of one pass over sharded sequences.

    Args:
        of: the pass.
        function: (batch, head, query, key) -> bool on global token indices, like transformers' mask functions.

    Attributes:
        whole: for `all_to_all`, the mask of whole sequences in the form that the kernel takes; see `_with_whole`.
    """

    def __init__(
        self, of: ContextParallelPass, function: Callable[..., Tensor], rows: int, device: torch.device
    ) -> None:
        from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

        self.of, self.axis, self.function, self.rows, self.device = of, of.axis, function, rows, device
        is_plain = of.real is None and of.positions is None
        is_filled = of.length == 2 * self.axis.size * self.axis.chunk(of.length)
        self._is_upto_itself = function is causal_mask_function
        self._window = window_of(function)
        self._is_causal = is_plain and self._is_upto_itself
        self._is_everything = is_plain and is_filled and function is bidirectional_mask_function
        self._known: dict[int, list[Block]] = {}
        self.whole: Tensor | None = None

    @cached_property
    def rows_without_keys(self) -> Tensor | None:
        """Queries here that see no key, [batch or 1, 1, part, 1] bool; None if nowhere; first asked together."""
        if self.of.real is None:  # a token sees itself
            return None
        places = self._places(self.axis.rank)
        if self._is_upto_itself:
            sees = self._at(self.of.real.cumsum(-1) > 0)(places[None, None, :, None])
        else:
            sees = self.allowed(places, torch.arange(self.of.length, device=self.device)).any(-1, keepdim=True)
        return any_of_ranks(~sees & (places < self.of.length)[:, None], self.of)

    def blocks(self, source: int) -> Sequence[Block]:
        """Return the blocks in which this rank's queries attend to the keys of rank `source`."""
        if source not in self._known:
            self._known[source] = self._find(source)
        return self._known[source]

    def _find(self, source: int) -> list[Block]:
        everything = slice(None)
        if self._is_everything:
            return [Block(everything, everything)]
        if self._is_causal:
            return self._causal(source)
        if self.spans is not None:
            return list(self._of_spans(source))
        return self._look(source) if self.device.type == "cpu" else self._masked(source)

    @cached_property
    def spans(self) -> list[tuple[slice, list[Span]]] | None:
        """The spans of a causal mask, of padding, documents and windows, by rows; None if the host knows none."""
        of, length = self.of, self.of.length
        if not (self._is_upto_itself or self._window) or (of.positions is not None and of.real is not None):
            return None
        if of.positions is not None:
            starts = of.positions_on_host.diff(dim=-1, prepend=of.positions_on_host[:, :1]) != 1
            borders = [[*row.nonzero()[:, 0].tolist(), length] for row in starts]
            spans = [[Span(a, b, b) for a, b in pairwise(row)] for row in borders]
        elif of.real is None:
            spans = [[Span(0, length, length)]]
        else:
            real = of.real if self.device.type == "cpu" else of.mask_on_host
            if real is None:
                return None
            tokens = [row.nonzero()[:, 0].tolist() for row in real]
            if any(row and len(row) != row[-1] + 1 - row[0] for row in tokens):  # padding between tokens
                return None
            spans = [[Span(row[0], row[-1] + 1, length)] if row else [] for row in tokens]
        if all(row == spans[0] for row in spans):
            return [(slice(None), spans[0])]
        return [(slice(row, row + 1), found) for row, found in enumerate(spans)]

    def _of_spans(self, source: int) -> Iterator[Block]:
        """Yield the blocks of spans: nothing masked, rectangles for each pair of chunks, and causal squares."""
        chunk, last = self.axis.chunk(self.of.length), 2 * self.axis.size - 1
        own, theirs = ((rank, last - rank) for rank in (self.axis.rank, source))
        pairs = [(q, k) for q in range(2) for k in range(2) if theirs[k] <= own[q]]
        for (q, k), (rows, spans) in product(pairs, self.spans):
            # Places in the sequence -> in this rank's queries, in the keys of `source`.
            of_query, of_key = (q - own[q]) * chunk, (k - theirs[k]) * chunk
            for start, keys, stop in spans:
                seen = range(max(start, theirs[k] * chunk), min(keys, (theirs[k] + 1) * chunk))
                queries = range(max(start, own[q] * chunk), min(stop, (own[q] + 1) * chunk))
                for block in blocks_of_span(queries, seen, self._window) if queries and seen else ():
                    places = slice(block.queries.start + of_query, block.queries.stop + of_query)
                    taken = slice(block.keys.start + of_key, block.keys.stop + of_key)
                    yield replace(block, queries=places, keys=taken, rows=rows)

    def _causal(self, source: int) -> list[Block]:
        """Return the blocks of a causal mask without padding or documents."""
        chunk, everything = self.axis.chunk(self.of.length), slice(None)
        if source == self.axis.rank:
            return [Block(everything, everything, is_causal=True)]
        # If `source` is an earlier rank, all queries see its first chunk and none sees its last. If it is a later rank,
        # the queries of the last chunk see both of its chunks and those of the first chunk see none.
        if source < self.axis.rank:
            return [Block(everything, slice(0, chunk))]
        return [Block(slice(chunk, None), everything)]

    def _look(self, source: int) -> list[Block]:
        """Evaluate the mask function, once per pass for all layers."""
        allowed = self.allowed(self._places(self.axis.rank), self._places(source))
        if not bool(allowed.any()):
            return []
        everything = slice(None)
        return [Block(everything, everything, allowed=None if bool(allowed.all()) else allowed)]

    def _masked(self, source: int) -> list[Block]:
        """Return a block with its mask, without reading the mask: the host would wait for the device."""
        everything = slice(None)
        return [Block(everything, everything, allowed=self.allowed(self._places(self.axis.rank), self._places(source)))]

    def _places(self, rank: int) -> Tensor:
        return self.axis.places(self.of.length, rank, self.device)

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the mask [batch or 1, 1, queries, keys], bool, for global token indices."""
        of, rows = self.of, torch.arange(self.rows, device=self.device)[:, None, None, None]
        q, k = queries[None, None, :, None], keys[None, None, None, :]
        found = k < of.length
        if of.positions is None:
            found = found & self.function(rows, torch.zeros_like(rows), q, k)
        else:
            places, documents = (self._at(x) for x in (of.positions, of.documents))
            found = found & self.function(rows, torch.zeros_like(rows), places(q), places(k))
            found = found & (documents(q) == documents(k))
        return found if of.real is None else found & self._at(of.real)(k)

    def _at(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a lookup of `x`, [batch or 1, length], by global token index; 0 past the end."""
        padded = F.pad(x, (0, 2 * self.axis.size * self.axis.chunk(self.of.length) - self.of.length))
        rows = torch.arange(len(x), device=x.device)[:, None, None, None]
        return lambda places: padded[rows, places]


class PendingMask:
    """Mask as a mask function returns it: without the pass, because it does not receive the model."""

    def __init__(self, make: Callable[[ContextParallelPass], ContextMask]) -> None:
        self._make, self._mask = make, None

    def __getitem__(self, parts: tuple[slice, ...]) -> PendingMask:
        """Return the mask for all tokens (0, of the last `logits_to_keep`); ValueError if a part is meant."""
        if any(part not in (slice(None), slice(0, None)) for part in parts):
            raise ValueError("a rank has no mask of some tokens under cp_size; use logits_to_keep=0, or cp_size=1")
        return self

    def of(self, axis: ZigzagSharding) -> ContextMask:
        """Return the mask of its pass: the latest over `axis` when the first layer asks."""
        if self._mask is None:
            self._mask = self._make(axis.latest)
        return self._mask


def use_context_attention(model: nn.Module, layers: Iterable[nn.Module], mode: str, axis: ZigzagSharding) -> None:
    """Route the attention of `layers` that goes through the registry to the kernels of this module.

    Attention of other modules of `model`, which read whole images or sounds, keeps its kernel.

    Args:
        mode: "ring_attn" or "all_to_all".
        axis: the sharding of the sequences.
    """
    within = {module for layer in layers for module in layer.modules()}
    for module in routed_modules(model, f"{PREFIX}{mode}_", partial(_register, mode=mode), within):
        module.context_axis = axis


def gather_behind_reader(reader: nn.Module, axis: ZigzagSharding) -> None:
    """Gather the hidden states that the reader of the shards returns: [batch, part, hidden] -> [batch, seq, hidden]."""

    def gather(_: nn.Module, args: tuple, output: Any) -> Any:
        if not hasattr(output, "last_hidden_state"):
            return first_output(output, lambda x: axis.gather(x, axis.latest.length))
        output.last_hidden_state = axis.gather(output.last_hidden_state, axis.latest.length)
        return output

    reader.register_forward_hook(gather)


def gather_behind_layer(layer: nn.Module, axis: ZigzagSharding) -> None:
    """Gather [batch, part, hidden] -> [batch, seq, hidden] behind the last layer, whose mask knows its pass."""
    length = 0

    def note(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        nonlocal length
        mask = next(value for value in (*args, *kwargs.values()) if isinstance(value, PendingMask))
        length = mask.of(axis).of.length

    layer.register_forward_pre_hook(note, with_kwargs=True)
    layer.register_forward_hook(lambda _, __, output: first_output(output, lambda x: axis.gather(x, length)))


def _register(name: str, implementation: str, mode: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    if mode == RING:
        AttentionInterface.register(name, partial(_ring, implementation == "eager"))
        AttentionMaskInterface.register(name, _mask)
    else:
        AttentionInterface.register(name, partial(_exchanged, implementation))
        AttentionMaskInterface.register(name, partial(_whole_mask, masks_of(implementation)))


def _mask(batch_size: int, mask_function: Callable[..., Tensor], device: Any = "cpu", **_: Any) -> PendingMask:
    """Build the mask of the current pass, as an entry of transformers' mask registry."""
    return PendingMask(partial(ContextMask, function=mask_function, rows=batch_size, device=torch.device(device)))


def _whole_mask(masks: Callable[..., Any], **kwargs: Any) -> PendingMask:
    """Build the same mask, plus the whole-sequence mask that the kernel's function `masks` makes."""
    return PendingMask(partial(_with_whole, masks, **kwargs))


def _with_whole(
    masks: Callable[..., Any],
    of: ContextParallelPass,
    batch_size: int,
    mask_function: Callable[..., Tensor],
    device: Any = "cpu",
    **kwargs: Any,
) -> ContextMask:
    mask = ContextMask(of, mask_function, batch_size, torch.device(device))
    options = {**kwargs, "q_length": of.length, "kv_length": of.length, "attention_mask": of.real}
    if of.positions is not None:
        places = torch.arange(of.length, device=mask.device)
        allowed = mask.allowed(places, places).expand(batch_size, -1, -1, -1)
        mask_function, options["allow_is_causal_skip"] = (lambda row, _, q, k: allowed[row, 0, q, k]), False
    mask.whole = masks(batch_size=batch_size, mask_function=mask_function, device=device, **options)
    return mask


def _ring(
    is_eager: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PendingMask,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Run ring attention: query, key, value [batch, heads, part, head_dim] -> [batch, part, heads, head_dim]."""
    if softcap is not None:
        raise TypeError(f"{type(module).__name__} soft-caps its scores, which a ring does not; use cp_size=1")
    mask = _mask_of_pass(module, attention_mask)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    seed = int(torch.randint(2**31, (), device="cpu")) if dropout else 0
    query, key, value = autocast(query, key, value)
    softmax = Softmax(scale, dropout, seed)
    with torch.autocast(query.device.type, enabled=False):
        found = ring_attention(query, key, value, mask.blocks, softmax, mask.axis.group, s_aux)
        if is_eager and s_aux is None and (rows := mask.rows_without_keys) is not None:
            found = torch.where(rows, attend_uniformly(query, key, value, mask.of, softmax), found)
    return found.transpose(1, 2).contiguous(), None


def _exchanged(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PendingMask,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Exchange to whole sequences of a subset of heads (DeepSpeed-Ulysses, arXiv 2309.14509), attend, and back."""
    mask = _mask_of_pass(module, attention_mask)
    axis, length = mask.axis, mask.of.length
    order = axis.order(length, query.device)

    def to_heads(x: Tensor) -> Tensor:
        """[batch, heads, part, head_dim] -> [batch, heads/cp, seq, head_dim], in sequence order."""
        return all_to_all(repeated_for(x, axis.size), 1, 2, axis.group).index_select(2, order)

    query, key, value = to_heads(query), to_heads(key), to_heads(value)
    if hasattr(module, "num_key_value_groups"):  # key/value heads may have been repeated
        module.num_key_value_groups = query.shape[1] // key.shape[1]
    if "position_ids" in kwargs:  # flash-attn finds packed documents by them, in the whole sequence
        kwargs["position_ids"] = mask.of.positions
    kernel = with_own_sinks(kernel_named(implementation, module), kwargs, axis.rank)
    found, weights = kernel(module, query, key, value, mask.whole, **kwargs)  # [batch, seq, heads/cp, ...]
    held = found.new_zeros(found.shape[0], 2 * axis.chunk(length) * axis.size, *found.shape[2:])
    return all_to_all(held.index_copy(1, order, found), 1, 2, axis.group), weights


def _mask_of_pass(module: nn.Module, mask: Any) -> ContextMask:
    if not isinstance(mask, PendingMask):
        raise TypeError(
            f"{type(module).__name__} got a {type(mask).__name__} for its mask, which says nothing of the tokens of "
            "other ranks; use cp_size=1"
        )
    return mask.of(module.context_axis)


# ----- rows of eager attention that see no key, as those of padding in front of a sequence -----
# Eager kernels of transformers add the lowest number of the dtype to the scores of hidden keys. Where all are hidden,
# the sums are equal, and a row reads all tokens with equal weights; other kernels return zero there. With padding in
# front, the loss of the first real token of a sequence depends on it.


def any_of_ranks(rows: Tensor, of: ContextParallelPass) -> Tensor | None:
    """Return `rows`, bool, if any rank has one that is true, and None otherwise: what follows needs all ranks."""
    found = rows.any().int()
    dist.all_reduce(found, dist.ReduceOp.MAX, group=of.axis.group)
    return rows if found.item() else None


def attend_uniformly(query: Tensor, key: Tensor, value: Tensor, of: ContextParallelPass, softmax: Softmax) -> Tensor:
    """Return an eager kernel's output if all keys, [batch, heads, seq, head_dim], are hidden: their mean."""
    key, value = (repeated(of.axis.gather(x, of.length, dim=2), query) for x in (key, value))
    # The scores are lost in the sum, but not their gradients.
    scores = query @ key.transpose(-1, -2) * softmax.scale + torch.finfo(query.dtype).min
    weights = scores.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    return F.dropout(weights, softmax.dropout) @ value
