"""Batch-invariant operations: what a token gets depends on the tokens before it in its text, and on nothing else.

Kernels choose how to round by the shape of their input, so that a token that is decoded alone, over a cache, gets other
bits than in a row of training. Here each operation that adds up values runs on tiles of one shape. Rows of a product
are computed `TILE` at a time, and attention adds up `TILE` keys at a time, counted from the first key that a query
sees. A tile that is not full is filled with zeros, which add nothing.

In training, a value comes from the tiles and its gradient from torch's own operation on the same input.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardformer.distributed.blocks import BlockedTensor

TILE = 32  # rows of a product, or keys
_QUERIES = 8 * TILE  # of a group
_SCORES = 1 << 24  # in memory at a time
_LANES = 64  # elements: kernels compute what is left of them with other instructions
_ALIGNMENT = 64  # bytes


class BatchInvariant(TorchFunctionMode):
    """Replace operations by batch-invariant ones inside of this context."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run the rule of `func`, once for each block of a tensor-parallel region."""
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is None:
            return func(*args, **kwargs)
        run = functools.partial(_with_gradient, func, rule)
        if any(issubclass(each, BlockedTensor) for each in types):
            return BlockedTensor.__torch_function__(run, types, args, kwargs)
        return run(*args, **kwargs)


class _Valued(torch.autograd.Function):
    """The value of one tensor, with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, differentiable: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _with_gradient(func: Callable, rule: Callable, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        value = rule(func, *args, **kwargs)
    if value is NotImplemented:
        return func(*args, **kwargs)
    if not torch.is_grad_enabled():
        return value
    differentiable = func(*args, **kwargs)
    return _Valued.apply(differentiable, value) if differentiable.requires_grad else value


# ----- products -----

_SAME: dict[tuple, bool] = {}  # shapes of an operation -> whether one call has the bits of its tiles


def _in_one_call(name: str, whole: Callable, by_tiles: Callable, x: Tensor, other: Tensor) -> Tensor:
    """Return what `by_tiles` does: by `whole`, where it has the same bits of random rows of this shape.

    The order in which a kernel adds up depends on shapes alone, so that random values tell once and for all.
    """
    key = (name, x.shape, other.shape, other.stride(), x.dtype, x.device)
    if key not in _SAME:
        generator = torch.Generator(x.device).manual_seed(0)
        rows = torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)
        is_same = torch.equal(whole(rows, other), by_tiles(rows, other))
        if is_same and not other.any():  # zeros tell nothing
            return whole(x, other)
        _SAME[key] = is_same
    return (whole if _SAME[key] else by_tiles)(x, other)


def _product(name: str, func: Callable[[Tensor, Tensor], Tensor], x: Tensor, other: Tensor) -> Tensor:
    """Return `func(x, other)` with the bits of tiles of rows; `name`: of the operation; `x`: [..., rows, features]."""
    count = x.shape[-2]
    if count == 0:
        return func(x, other)
    x = _aligned(F.pad(x, (0, 0, 0, -count % TILE)) if count % TILE else x)
    found = _in_one_call(name, func, functools.partial(_by_tiles, name, func), x, other)
    return found.narrow(-2, 0, count).contiguous()


def _by_tiles(name: str, func: Callable[[Tensor, Tensor], Tensor], x: Tensor, other: Tensor) -> Tensor:
    key = (name, x.shape[:-2], x.shape[-1], other.shape, other.stride(), x.dtype, x.device)
    if key not in _SAME:
        _SAME[key] = _rows_agree(func, x, other)
    tiles = x.split(TILE if _SAME[key] else 1, -2)
    return torch.cat([func(_aligned(tile), other) for tile in tiles], -2)


def _rows_agree(func: Callable[[Tensor, Tensor], Tensor], x: Tensor, other: Tensor) -> bool:
    """Return whether each row of a tile is computed in one way, whatever its place."""
    generator = torch.Generator(x.device).manual_seed(0)
    row = torch.randn(*x.shape[:-2], 1, x.shape[-1], generator=generator, device=x.device).to(x.dtype)
    found = func(row.expand(*x.shape[:-2], TILE, -1).contiguous(), other)
    return bool((found == found[..., :1, :]).all())


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


def _linear(func: Callable, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    name = "linear" if bias is None else "linear with bias"
    found = _product(name, lambda x, other: func(x, other, bias), input.reshape(-1, input.shape[-1]), weight)
    return found.view(*input.shape[:-1], -1)


def _addmm(func: Callable, input: Tensor, mat1: Tensor, mat2: Tensor, **factors: Any) -> Tensor:
    return _product("addmm", lambda x, other: func(input, x, other, **factors), mat1, mat2)


def _matmul(func: Callable, input: Tensor, other: Tensor) -> Tensor:
    if input.dim() < 2 or other.dim() < 2 or input.shape[-1] == 1:  # nothing to add up
        return NotImplemented
    if other.dim() > 2:
        return _product("matmul", func, input, other)
    return _product("matmul", func, input.reshape(-1, input.shape[-1]), other).view(*input.shape[:-1], -1)


def _grouped_mm(func: Callable, input: Tensor, weight: Tensor, *, offs: Tensor, **options: Any) -> Tensor:
    ends = [0, *offs.tolist()]
    parts = [
        _product("matmul", torch.mm, input[start:end], each)
        for (start, end), each in zip(itertools.pairwise(ends), weight, strict=True)
    ]
    return F.pad(torch.cat(parts), (0, 0, 0, len(input) - ends[-1]))


# ----- functions of each element -----


def _elementwise(func: Callable, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not input.is_floating_point():
        return NotImplemented
    flat = input.reshape(-1)
    filled = F.pad(flat, (0, -len(flat) % _LANES)) if len(flat) % _LANES else flat
    return func(filled, *args, **kwargs)[: len(flat)].view(input.shape)


# ----- attention -----


def _attention(
    func: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention in fp32, rounded once: of each row, by groups of queries that see the same first key.

    Args:
        query, key, value: [batch, heads, queries or keys, features].
        attn_mask: [batch or 1, heads or 1, queries or 1, keys]: what is visible, or what is added to the scores.
    """
    if dropout_p > 0 or query.dim() != 4:
        return NotImplemented
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1).float() for each in (key, value))
    value = F.pad(value, (0, 1), value=1.0)  # the last column adds up the weights
    scaled = query.float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    mask = scaled.new_zeros(1, 1, query.shape[2], key.shape[2]) if attn_mask is None else attn_mask
    if is_causal:
        mask = mask.masked_fill(torch.ones_like(mask, dtype=torch.bool).triu(1), -torch.inf)
    if not mask.is_floating_point():
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
    mask = mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf).float()
    mask = mask.expand(-1, -1, query.shape[2], -1)
    found = query.new_zeros(*query.shape[:3], value.shape[-1] - 1)
    visible = [list(_groups(each)) for each in (mask > -torch.inf).any(1)]
    alike = defaultdict(list)  # tiles of queries and of keys -> places of groups
    for row in range(len(query)):
        for queries, keys in visible[row % len(mask)]:
            alike[tuple(-(-(each.stop - each.start) // TILE) for each in (queries, keys))].append((row, queries, keys))
    line = torch.arange(max(mask.shape[2:]) + TILE, device=query.device)
    for tiles, places in alike.items():
        size = max(1, _SCORES // (TILE**2 * math.prod(tiles) * query.shape[1]))
        for some in (places[index : index + size] for index in range(0, len(places), size)):
            spans = [(row, queries.start, queries.stop, keys.start, keys.stop) for row, queries, keys in some]
            rows, *ends = torch.tensor(spans, device=query.device)[..., None].unbind(1)  # [groups, 1] each
            at, keys_at = (start + line[: count * TILE] for start, count in zip(ends[::2], tiles, strict=True))
            is_filling = keys_at >= ends[3]
            at, keys_at = torch.minimum(at, ends[1] - 1), torch.minimum(keys_at, ends[3] - 1)
            bias = mask[rows[..., None] % len(mask), :, at[:, :, None], keys_at[:, None]].permute(0, 3, 1, 2)
            bias = bias.masked_fill(is_filling[:, None, None], -torch.inf)
            parts = (
                each[rows, :, where].transpose(1, 2).contiguous()
                for each, where in ((scaled, at), (key, keys_at), (value, keys_at))
            )
            found[rows, :, at] = _of_groups(*parts, bias).transpose(1, 2).to(query.dtype)
    return found


def _groups(visible: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield queries that see one first key, and the keys up to their last; `visible`: [queries, keys]."""
    places, length = visible.to(torch.uint8), visible.shape[1]
    first = torch.where(visible.any(1), places.argmax(1), length).tolist()
    ends = (length - places.flip(1).argmax(1)).tolist()
    for start, group in itertools.groupby(range(len(first)), first.__getitem__):
        queries = list(group) if start < length else []
        for some in (queries[index : index + _QUERIES] for index in range(0, len(queries), _QUERIES)):
            yield slice(some[0], some[-1] + 1), slice(start, max(ends[some[0] : some[-1] + 1]))


def _of_groups(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Return attention of groups of queries that see the same first key, [groups, heads, queries, features].

    Args:
        query, key, value: [groups, heads, queries or keys, features], whole tiles; queries are scaled, the last column
            of values is 1.
        bias: [groups, heads or 1, queries, keys], -inf for keys that a query does not see.
    """
    scores = _in_one_call("scores", _scores, _scores_by_tiles, query, key) + bias
    weights = _elementwise(torch.exp, scores - scores.amax(-1, keepdim=True))
    weights = weights.unflatten(-1, (-1, TILE)).transpose(2, 3).contiguous()  # [groups, heads, tiles, queries, TILE]
    total = _in_one_call("values", torch.matmul, _values_by_tiles, weights, value.unflatten(2, (-1, TILE)))
    while total.shape[2] > 1:  # a tree by position, to which tiles of keys that no query sees add nothing
        count = total.shape[2] // 2 * 2
        total = torch.cat([total[:, :, 0:count:2] + total[:, :, 1:count:2], total[:, :, count:]], 2)
    return total[:, :, 0, :, :-1] / total[:, :, 0, :, -1:]


def _scores(query: Tensor, key: Tensor) -> Tensor:
    return torch.matmul(query, key.transpose(-1, -2))


def _scores_by_tiles(query: Tensor, key: Tensor) -> Tensor:
    def of_tile(each: Tensor, tile: Tensor) -> Tensor:  # [heads, queries, features], [heads, TILE, features]
        return _by_tiles("matmul", torch.matmul, each, _aligned(tile).transpose(1, 2))

    tiles = [each.split(TILE, 1) for each in key]
    return torch.stack(
        [torch.cat([of_tile(each, tile) for tile in row], -1) for each, row in zip(query, tiles, strict=True)]
    )


def _values_by_tiles(weights: Tensor, value: Tensor) -> Tensor:
    def of_tile(*pair: Tensor) -> Tensor:  # [heads, queries, TILE], [heads, TILE, features]
        return _by_tiles("matmul", torch.matmul, *map(_aligned, pair))

    pairs = zip(weights, value, strict=True)
    return torch.stack([torch.stack([*map(of_tile, each.unbind(1), tiles.unbind(1))], 1) for each, tiles in pairs])


_ELEMENTWISE = ("exp", "tanh", "sigmoid", "cos", "sin")
_RULES: dict[Callable, Callable] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.__matmul__), _matmul),
    torch._grouped_mm: _grouped_mm,  # what `F.grouped_mm` calls
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys((F.silu, F.gelu, F.softplus), _elementwise),
    **dict.fromkeys((getattr(owner, name) for owner in (torch, Tensor) for name in _ELEMENTWISE), _elementwise),
}
