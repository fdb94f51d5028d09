"""Column- and row-parallel linear layers, from `nn.Linear` and `Conv1D`.

What breaks here first: uneven sizes, fused parts and copied heads. Look in `shardformer/layers/linear.py`.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardformer.layers import ColumnParallelLinear, RowParallelLinear, SharedInput
from zoo_tests.harness.native import EXACT, check_gradients, cut_features, fill, known
from zoo_tests.harness.ranks import distributed


def _native(kind: str, in_features: int, out_features: int, bias: bool = True) -> nn.Module:
    if kind == "linear":
        return fill(nn.Linear(in_features, out_features, bias=bias))
    from transformers.pytorch_utils import Conv1D

    return fill(Conv1D(out_features, in_features))


# ----- column -----

KINDS = [("linear", True), ("linear", False), ("conv1d", True)]


def _check_column(native: nn.Module, in_features: int, **options: object) -> ColumnParallelLinear:
    """Output, input gradient and parameter gradients, where every rank uses its own part of the output."""
    x, plain_x = known(2, 3, in_features, grad=True), known(2, 3, in_features, grad=True)
    layer = ColumnParallelLinear.from_native_module(native, dist.group.WORLD, **options)
    expected, found = native(plain_x), layer(x)
    weights = known(*expected.shape, seed=9)
    (expected * weights).sum().backward()
    if not options.get("gather_output"):
        expected, weights = (cut_features(value, layer.weight) for value in (expected, weights))
    torch.testing.assert_close(found, expected, **EXACT)
    (found * weights).sum().backward()
    if layer.weight.shard_spec.copies == 1:
        torch.testing.assert_close(x.grad, plain_x.grad, **EXACT)
        check_gradients(layer, native)
    return layer


@pytest.mark.parametrize("gather_output", [False, True])
@pytest.mark.parametrize(("kind", "bias"), KINDS)
@pytest.mark.parametrize("out_features", [8, 7, 3])
@distributed(4)
def test_column(out_features: int, kind: str, bias: bool, gather_output: bool) -> None:
    """3 features over 4 ranks leave one rank without any."""
    _check_column(_native(kind, 5, out_features, bias), 5, gather_output=gather_output)


@pytest.mark.parametrize(("kind", "bias"), KINDS)
@pytest.mark.parametrize(("part_size", "num_heads"), [(12, 4), (12, 6), (10, 2), (7, None)])
@distributed(2)
def test_fused_parts_are_cut_each_on_its_own(part_size: int, num_heads: int | None, kind: str, bias: bool) -> None:
    native = _native(kind, 5, 3 * part_size, bias)
    layer = _check_column(native, 5, part_size=part_size, num_heads=num_heads)
    starts = [start // part_size for start, _, _ in layer.weight.shard_spec.pieces()]
    assert starts == [0, 1, 2], "every rank has a piece of query, key and value"


@distributed(4)
def test_heads_are_never_cut() -> None:
    """6 heads of 3 over 4 ranks: 2, 2, 1 and 1 heads."""
    layer = _check_column(_native("linear", 5, 18), 5, num_heads=6)
    assert layer.weight.shape[0] == (6, 6, 3, 3)[dist.get_rank()]


@distributed(4)
def test_fused_parts_cannot_be_gathered() -> None:
    with pytest.raises(ValueError, match="gather_output=True cannot put fused parts or heads together"):
        ColumnParallelLinear.from_native_module(
            _native("linear", 4, 8), dist.group.WORLD, part_size=4, gather_output=True
        )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_heads", [1, 2])
@distributed(4)
def test_fewer_heads_than_ranks_are_copied_and_their_gradients_summed(num_heads: int, bias: bool) -> None:
    """Every copy is read by other query heads: each rank's own weights make its own partial gradient."""
    native = _native("linear", 5, num_heads * 3, bias)
    x, plain_x = known(2, 5, grad=True), known(2, 5, grad=True)
    layer = ColumnParallelLinear.from_native_module(native, dist.group.WORLD, num_heads=num_heads)
    copies = 4 // num_heads
    assert layer.weight.shard_spec.copies == copies and layer.weight.shape[0] == 3
    weights = known(4, 2, 3, seed=5)  # of every rank
    expected = native(plain_x).view(2, num_heads, 3)
    sum((expected[:, rank // copies] * weights[rank]).sum() for rank in range(4)).backward()
    found = layer(x)
    torch.testing.assert_close(found, expected[:, dist.get_rank() // copies], **EXACT)
    (found * weights[dist.get_rank()]).sum().backward()
    torch.testing.assert_close(x.grad, plain_x.grad, **EXACT)
    check_gradients(layer, native)


@distributed(2)
def test_frozen_parameters_and_inputs_need_no_gradient() -> None:
    native = _native("linear", 5, 7)
    native.weight.requires_grad_(False)
    layer = ColumnParallelLinear.from_native_module(native, dist.group.WORLD)
    layer(known(2, 5)).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None


@distributed(2)
def test_other_modules_are_refused() -> None:
    for layer in (ColumnParallelLinear, RowParallelLinear):
        with pytest.raises(TypeError, match="LayerNorm is not a linear layer"):
            layer.from_native_module(nn.LayerNorm(4), dist.group.WORLD)


# ----- row -----


@pytest.mark.parametrize(("kind", "bias"), KINDS)
@pytest.mark.parametrize(("in_features", "num_heads"), [(8, None), (7, None), (3, None), (18, 6)])
@distributed(4)
def test_row(in_features: int, num_heads: int | None, kind: str, bias: bool) -> None:
    native = _native(kind, in_features, 5, bias)
    layer = RowParallelLinear.from_native_module(native, dist.group.WORLD, num_heads=num_heads)
    plain_x = known(2, 3, in_features, grad=True)
    x = cut_features(plain_x.detach(), layer.weight).requires_grad_()
    expected, found = native(plain_x), layer(x)
    torch.testing.assert_close(found, expected, **EXACT)
    weights = known(*expected.shape, seed=9)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    torch.testing.assert_close(x.grad, cut_features(plain_x.grad, layer.weight), **EXACT)
    check_gradients(layer, native)


@pytest.mark.parametrize("hidden", [8, 7])
@distributed(4)
def test_column_and_row_make_one_region(hidden: int) -> None:
    """The MLP that they are for: one all-reduce forward, one backward."""
    native = nn.Sequential(_native("linear", 5, hidden), nn.GELU(), _native("linear", hidden, 5))
    layers = nn.Sequential(
        ColumnParallelLinear.from_native_module(native[0], dist.group.WORLD),
        nn.GELU(),
        RowParallelLinear.from_native_module(native[2], dist.group.WORLD),
    )
    x, plain_x = known(2, 5, grad=True), known(2, 5, grad=True)
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        found = layers(x)
        found.square().sum().backward()
    assert all_reduce.call_count == 2
    expected = native(plain_x)
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected, **EXACT)
    torch.testing.assert_close(x.grad, plain_x.grad, **EXACT)
    check_gradients(layers, native)


# ----- layers that share their input -----


class _Projections(nn.Module):
    """Query, key and value; key and value may read another input."""

    def __init__(self, sizes: tuple[int, int, int]) -> None:
        super().__init__()
        self.query, self.key, self.value = (_native("linear", 5, size) for size in sizes)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        memory = x if other is None else other
        return torch.cat([self.query(x), self.key(memory), self.value(memory)], dim=-1)

    def shard(self) -> _Projections:
        for name, layer in list(self.named_children()):
            setattr(self, name, ColumnParallelLinear.from_native_module(layer, dist.group.WORLD))
        SharedInput([self.query, self.key, self.value])
        return self


def _cut_all(expected: Tensor, native: _Projections, layers: _Projections) -> Tensor:
    outputs = expected.split([layer.weight.shape[0] for layer in native.children()], dim=-1)
    parts = zip(outputs, layers.children(), strict=True)
    return torch.cat([cut_features(output, layer.weight) for output, layer in parts], dim=-1)


@distributed(2)
def test_layers_with_one_input_share_one_all_reduce() -> None:
    native, layers = _Projections((6, 4, 7)), _Projections((6, 4, 7)).shard()
    x, plain_x = known(2, 3, 5, grad=True), known(2, 3, 5, grad=True)
    found, expected = layers(x), native(plain_x)
    torch.testing.assert_close(found, _cut_all(expected, native, layers), **EXACT)
    expected.square().sum().backward()
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        found.square().sum().backward()
    assert all_reduce.call_count == 1
    torch.testing.assert_close(x.grad, plain_x.grad, **EXACT)
    check_gradients(layers, native)


@distributed(2)
def test_cross_attention_reads_another_input() -> None:
    native, layers = _Projections((6, 4, 7)), _Projections((6, 4, 7)).shard()
    inputs = [known(2, 3, 5, seed=seed, grad=True) for seed in (0, 1, 0, 1)]
    found, expected = layers(*inputs[:2]), native(*inputs[2:])
    torch.testing.assert_close(found, _cut_all(expected, native, layers), **EXACT)
    expected.square().sum().backward()
    found.square().sum().backward()
    for one, other in zip(inputs[:2], inputs[2:], strict=True):
        torch.testing.assert_close(one.grad, other.grad, **EXACT)
    check_gradients(layers, native)


@distributed(2)
def test_nothing_is_remembered_from_one_call_to_the_next() -> None:
    """Twice with the same input, without gradients first, after a change in place, and one layer alone."""
    native, layers = _Projections((6, 4, 7)), _Projections((6, 4, 7)).shard()
    x, plain_x = known(2, 3, 5, grad=True), known(2, 3, 5, grad=True)
    with torch.no_grad():
        torch.testing.assert_close(layers(x), _cut_all(native(x), native, layers), **EXACT)
    with torch.no_grad():
        layers.query(x)  # the other two outputs wait for nobody
    for _ in range(2):
        layers(x).square().sum().backward()
        native(plain_x).square().sum().backward()
    torch.testing.assert_close(x.grad, plain_x.grad, **EXACT)
    check_gradients(layers, native)
    with torch.no_grad():
        layers.query(x)
        x.mul_(2)
        torch.testing.assert_close(layers.key(x), cut_features(native.key(x), layers.key.weight), **EXACT)
        torch.testing.assert_close(layers(x), _cut_all(native(x), native, layers), **EXACT)
