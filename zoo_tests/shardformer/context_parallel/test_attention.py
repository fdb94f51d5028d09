"""Packed and padded rows over ranks: each pair of tokens that is needed is computed once, and no mask is made.

Look in `shardformer/context_parallel/attention.py`: at `spans`, or where a span crosses from one chunk to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from shardformer.context_parallel import ring
from shardformer.context_parallel.attention import ContextMask
from shardformer.context_parallel.ring import Block, Softmax
from shardformer.context_parallel.zigzag import ContextParallelPass, ZigzagSharding


def _axis(size: int, rank: int) -> ZigzagSharding:
    axis = object.__new__(ZigzagSharding)
    axis.size, axis.rank, axis.group = size, rank, None
    return axis


@st.composite
def _masks(draw: st.DrawFn) -> ContextMask:
    """Rows of documents, or of tokens with padding before and behind them, on 1 to 4 ranks; some with windows."""
    of, window = draw(_passes()), draw(st.sampled_from([None, 1, 2, 5, 9, 30]))
    rows = next(len(each) for each in (of.positions, of.real, [None] * 2) if each is not None)
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    return ContextMask(of, function, rows, torch.device("cpu"))


@st.composite
def _passes(draw: st.DrawFn) -> ContextParallelPass:
    size, rows = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    length = draw(st.integers(2 * size, 40))
    axis = _axis(size, draw(st.integers(0, size - 1)))
    if draw(st.booleans()):
        several = st.lists(st.integers(1, 15), min_size=length, max_size=length)
        rows_of = [[place for size in draw(several) for place in range(size)][:length] for _ in range(rows)]
        return ContextParallelPass(axis, length, positions=torch.tensor(rows_of))
    if draw(st.booleans()):
        return ContextParallelPass(axis, length)
    real = torch.zeros(rows, length, dtype=torch.bool)
    for row in real:
        start, stop = sorted(draw(st.tuples(st.integers(0, length), st.integers(0, length))))
        row[start:stop] = True
    return ContextParallelPass(axis, length, real)


def _mask(of: ContextParallelPass, rows: int) -> ContextMask:
    return ContextMask(of, causal_mask_function, rows, torch.device("cpu"))


@settings(max_examples=90, deadline=None)
@given(_masks())
def test_pairs_computed_are_pairs_needed(mask: ContextMask) -> None:
    """Queries behind the end of sequences, whose output nothing reads, may see anything."""
    of, rows = mask.of, mask.rows
    for source in range(of.axis.size):
        queries, keys = mask._places(of.axis.rank), mask._places(source)
        needed = mask.allowed(queries, keys)[:, 0].int().expand(rows, -1, -1)
        found = torch.zeros_like(needed)
        for block in mask.blocks(source):
            assert block.allowed is None
            pairs = found[block.rows, block.queries, block.keys]
            ones = torch.ones_like(pairs)
            pairs += (ones.triu() if block.is_flipped else ones.tril()) if block.is_causal else ones
        assert torch.equal(found[:, queries < of.length], needed[:, queries < of.length])


def _attended(
    blocks: Callable[[int], Sequence[Block]], inputs: Sequence[Tensor], keys: Sequence[Tensor], softmax: Softmax
) -> list[Tensor]:
    """What one rank finds, and its gradients of its queries, and of the keys and values of each rank.

    Args:
        inputs: query and gradient, [rows, heads, part, head_dim].
        keys: of each rank, keys and values in one, [2, rows, heads, part, head_dim].
    """
    query, grad = inputs
    found, logs = torch.zeros_like(query), query.new_full(query.shape[:-1], -torch.inf)
    places = [
        (source, block, (block.rows, slice(None), block.queries), (block.rows, slice(None), block.keys))
        for source in range(len(keys))
        for block in blocks(source)
    ]
    for source, block, q, k in places:
        key, value = keys[source]
        ring.merge(found[q], logs[q], *ring.attend(query[q], key[k], value[k], block, softmax))
    logs = logs.masked_fill(logs == -torch.inf, 0.0)
    of_query, of_keys = torch.zeros_like(query), [torch.zeros_like(each) for each in keys]
    for source, block, q, k in places:
        key, value = keys[source]
        parts = (grad[q], query[q], key[k], value[k], found[q], logs[q])
        of = ring.attend_backward(*parts, block, softmax)
        of_query[q] += of.query
        of_keys[source][0][k] += of.key
        of_keys[source][1][k] += of.value
    return [found, of_query, *of_keys]


@settings(max_examples=40, deadline=None)
@given(_masks())
def test_spans_find_what_masks_find(mask: ContextMask) -> None:
    of, rows, generator = mask.of, mask.rows, torch.Generator().manual_seed(3)
    part = 2 * of.axis.chunk(of.length)
    query, grad, *keys = (
        torch.randn((*more, rows, heads, part, 4), generator=generator, dtype=torch.float64)
        for more, heads in (((), 4), ((), 4), *[((2,), 2)] * of.axis.size)
    )
    grad[:, :, mask._places(of.axis.rank) >= of.length] = 0.0  # nothing reads these
    found = _attended(mask.blocks, (query, grad), keys, Softmax(0.4))
    expected = _attended(mask._look, (query, grad), keys, Softmax(0.4))
    real = mask._places(of.axis.rank) < of.length
    assert torch.allclose(found[0][:, :, real], expected[0][:, :, real], atol=1e-12)
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_padding_inside_of_a_row_keeps_its_mask() -> None:
    real = torch.tensor([[True, False, True, True]])
    mask = _mask(ContextParallelPass(_axis(1, 0), 4, real), 1)
    assert mask.spans is None and [block.allowed is None for block in mask.blocks(0)] == [False]


def test_tokens_before_which_all_is_padding_see_no_key() -> None:
    real = torch.tensor([[False, False, True, True], [True, True, False, False]])
    of = ContextParallelPass(_axis(1, 0), 4, real)
    with mock.patch("shardformer.context_parallel.attention.any_of_ranks", lambda rows, _: rows):
        assert _mask(of, 2).rows_without_keys[:, 0, :, 0].tolist() == [[True, True, False, False], [False] * 4]


class _Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operator makes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        made = func(*args, **(kwargs or {}))
        sizes = [each.numel() * each.element_size() for each in tree_leaves(made) if isinstance(each, Tensor)]
        self.bytes = max([self.bytes, *sizes])
        return made


@pytest.mark.parametrize(("rank", "window", "is_packed"), [(0, None, True), (3, None, False), (3, 1024, True)])
def test_the_largest_tensor_of_a_long_row_is_one_of_its_tokens(rank: int, window: int | None, is_packed: bool) -> None:
    """32,768 tokens on 4 ranks, in bf16 with 32 heads of 128: 134 MB in fp32, where scores would have 8.6 GB."""
    length, (heads, groups, size) = 32768, (32, 8, 128)
    positions = torch.cat([torch.arange(each) for each in (9000, 1000, 3, 12765, 10000)])[None]
    real = torch.arange(length)[None] < 30000
    facts = {"positions": positions} if is_packed else {"real": real, "mask_on_host": real}
    of = ContextParallelPass(_axis(4, rank), length, **facts)
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    mask = ContextMask(of, function, 1, torch.device("meta"))
    part = length // 4
    query, grad = (torch.empty(1, heads, part, size, dtype=torch.bfloat16, device="meta") for _ in range(2))
    keys = [torch.empty(2, 1, groups, part, size, dtype=torch.bfloat16, device="meta") for _ in range(4)]
    with mock.patch.object(ring, "_has_cuda_kernel", lambda *_: True), _Largest() as largest:
        _attended(mask.blocks, (query, grad), keys, Softmax(size**-0.5))
    assert largest.bytes <= 4 * heads * part * size
