"""Fused norms equal the native ones.

What breaks here first: a release of transformers that renames an attribute of its norms. Look in
`shardformer/layers/norm.py`.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from shardformer.layers import FusedLayerNorm, FusedRMSNorm, ParallelModule
from zoo_tests.harness.native import fill, known

NORMS = [
    (FusedLayerNorm, lambda: nn.LayerNorm(7, eps=1e-3)),
    (FusedLayerNorm, lambda: nn.LayerNorm(7, bias=False)),
    (FusedRMSNorm, lambda: LlamaRMSNorm(7, eps=1e-3)),
]


@pytest.mark.parametrize(("fused", "make"), NORMS, ids=["layer", "layer-no-bias", "rms"])
def test_output_and_gradients(fused: type[ParallelModule], make: object) -> None:
    native = fill(make()).float()  # Llama's norm computes in fp32 whatever its dtype
    layer = fused.from_native_module(copy.deepcopy(native), None)
    x, plain_x = (known(3, 5, 7).float().requires_grad_() for _ in range(2))
    weights = known(3, 5, 7, seed=1).float()
    expected, found = native(plain_x), layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    torch.testing.assert_close(x.grad, plain_x.grad, rtol=1e-5, atol=1e-6)
    for (name, param), (_, other) in zip(native.named_parameters(), layer.named_parameters(), strict=True):
        torch.testing.assert_close(other.grad, param.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("fused", [FusedLayerNorm, FusedRMSNorm])
def test_parameters_are_taken_over_not_copied(fused: type[ParallelModule]) -> None:
    native = nn.LayerNorm(4) if fused is FusedLayerNorm else LlamaRMSNorm(4)
    assert fused.from_native_module(native, None).weight is native.weight
