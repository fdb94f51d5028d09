"""Shards of quantised weights: dequantised, they have the bits of the shard of the dequantised weight.

What breaks here first: a scale next to the one of its block, where a cut splits blocks of values or of scales.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardformer.layers import ColumnParallelLinear, RowParallelLinear
from shardformer.layers.linear import row_spec
from shardformer.matmul.quantised import kind_of_layer
from shardformer.shard_spec import Part, ShardSpec
from zoo_tests.harness.ranks import distributed

bitsandbytes = pytest.importorskip("bitsandbytes")


def _four_bit(shape: tuple[int, int], blocks: int = 64, **options: Any) -> nn.Module:
    """A layer whose scales differ from block to block, quantised as `Linear4bit.to` does."""
    layer = bitsandbytes.nn.Linear4bit(shape[1], shape[0], bias=False, compute_dtype=torch.float32, **options)
    values = torch.randn(shape) * torch.logspace(-2, 1, shape[0] * shape[1]).view(shape)
    kept = vars(layer.weight) | {"blocksize": blocks}
    layer.weight = bitsandbytes.nn.Params4bit(values, requires_grad=False, **kept).to("cpu")
    return layer


def _eight_bit(shape: tuple[int, int]) -> nn.Module:
    layer = bitsandbytes.nn.Linear8bitLt(shape[1], shape[0], bias=False, has_fp16_weights=False)
    layer.weight = bitsandbytes.nn.Int8Params(torch.randn(shape), requires_grad=False).to("cpu")
    return layer


def _values(weight: nn.Parameter) -> Tensor:
    if isinstance(weight, bitsandbytes.nn.Int8Params):
        return bitsandbytes.functional.int8_vectorwise_dequant(weight.data, weight.SCB)
    return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)


_HEADS = (Part(288, 24),)  # 12 heads; 5 ranks hold 3, 3, 2, 2, 2
_FUSED = (Part(96, 16), Part(64, 16), Part(128, 16))
_VOCABULARY = (Part(101, padded_size=128),)


@pytest.mark.parametrize(
    ("parts", "num_in", "ranks", "options"),
    [
        (_HEADS, 128, 5, {"quant_type": "nf4"}),
        (_HEADS, 192, 5, {"quant_type": "fp4", "compress_statistics": False}),
        (_FUSED, 384, 2, {"quant_type": "nf4", "blocks": 128}),
        (_VOCABULARY, 64, 4, {"quant_type": "nf4", "quant_storage": torch.bfloat16}),
        ((Part(1024),), 512, 4, {"quant_type": "nf4"}),  # double quantisation is kept: whole blocks of scales
        ((Part(32, 16),), 64, 4, {"quant_type": "nf4"}),  # 2 heads on 4 ranks
        (_HEADS, 80, 5, None),
        (_VOCABULARY, 24, 4, None),
    ],
)
def test_rows(parts: tuple[Part, ...], num_in: int, ranks: int, options: dict[str, Any] | None) -> None:
    torch.manual_seed(0)
    shape = (sum(part.size for part in parts), num_in)
    layer = _eight_bit(shape) if options is None else _four_bit(shape, **options)
    copies = 2 if ranks == 4 and parts[0].unit == 16 else 1
    for rank in range(ranks):
        features = ShardSpec((shape[0],), 0, parts, rank, ranks, copies)
        shard = kind_of_layer(layer).cut(layer, features, 0)
        expected = replace(features, full_shape=shape).shard(_values(layer.weight))
        assert torch.equal(_values(shard), expected)
        assert shard.shard_spec.local_shape == tuple(shard.shape)
    if num_in == 512:
        assert shard.quant_state.nested and shard.blocksize == 64


@pytest.mark.parametrize(
    ("part", "ranks", "options", "blocks"),
    [
        (Part(256, 32), 2, {"quant_type": "nf4"}, 64),
        (Part(320, 32), 4, {"quant_type": "fp4"}, 32),  # 3, 3, 2 and 2 heads: two borders are in blocks
        (Part(512, 128), 2, {"quant_type": "nf4", "blocks": 512, "compress_statistics": False}, 256),
    ],
)
def test_columns(part: Part, ranks: int, options: dict[str, Any], blocks: int) -> None:
    torch.manual_seed(0)
    layer = _four_bit((48, part.size), **options)
    for rank in range(ranks):
        features = ShardSpec((part.size,), 0, (part,), rank, ranks)
        assert kind_of_layer(layer).cuts_inputs(layer, features)
        shard = kind_of_layer(layer).cut(layer, features, 1)
        expected = replace(features, full_shape=(48, part.size), dim=1).shard(_values(layer.weight))
        assert torch.equal(_values(shard), expected)
        assert shard.shard_spec.local_shape == tuple(shard.shape) and shard.blocksize == blocks


def test_what_has_no_border_of_blocks() -> None:
    straddling = ShardSpec((192,), 0, (Part(192, 48),), 0, 4)  # 48 values each
    layer, rows_of_other_sizes = _four_bit((32, 192)), _eight_bit((32, 192))
    assert not kind_of_layer(layer).cuts_inputs(layer, straddling)
    assert not kind_of_layer(rows_of_other_sizes).cuts_inputs(rows_of_other_sizes, straddling)
    assert "rows of 96 values, which blocks of 64 do not divide" in kind_of_layer(layer).problem(_four_bit((32, 96)))


@distributed(2)
def test_layers_that_round_their_inputs() -> None:
    """In evaluation 8-bit layers do, by the largest value of a token: the bits show whether a rank has seen it."""
    native = bitsandbytes.nn.Linear8bitLt(96, 48, bias=False, has_fp16_weights=False, threshold=6.0).eval()
    native.weight = bitsandbytes.nn.Int8Params(torch.randn(48, 96), requires_grad=False).to("cpu")
    group, rank = dist.group.WORLD, dist.get_rank()
    features = row_spec(native.in_features, group)
    for target in (ColumnParallelLinear, RowParallelLinear):
        layer = target.from_native_module(native, group).train(native.training)
        whole = torch.randn(2, 5, native.in_features).mul_(8).requires_grad_()  # some are above the threshold of 6
        expected, local = native(whole), whole
        weights = torch.randn(expected.shape)
        (grad,) = torch.autograd.grad((expected * weights).sum(), whole)
        if target is RowParallelLinear:
            local = replace(features, full_shape=tuple(whole.shape), dim=2).shard(whole.detach()).requires_grad_()
            grad = replace(features, full_shape=tuple(whole.shape), dim=2).shard(grad)
        out = layer(local)
        if target is ColumnParallelLinear:
            expected, weights = (each.tensor_split(2, dim=-1)[rank] for each in (expected, weights))
        assert torch.equal(out, expected)
        (found,) = torch.autograd.grad((out * weights).sum(), local)
        torch.testing.assert_close(found, grad, rtol=1e-3, atol=1e-3)
