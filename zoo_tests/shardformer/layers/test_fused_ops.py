"""Fused operators equal their eager forms, forward and backward, compiled or not, in the models that have them.

What breaks here first: a GELU that is taken for the other one, a dropout mask from another stream.
"""

from __future__ import annotations

import copy
import shutil
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import ModelOutput
from transformers.models.bloom.modeling_bloom import bloom_gelu_forward

from shardformer import ShardConfig, ShardFormer
from shardformer.layers import fused_ops as fused
from shardformer.layers.fused_ops import bias_activation, dropout_add, gated
from zoo_tests.harness.case import DTYPES
from zoo_tests.zoo import FAMILIES

_ACTIVATIONS = {
    "silu": F.silu,
    "none": F.gelu,
    "tanh": partial(F.gelu, approximate="tanh"),
    "bloom": bloom_gelu_forward,
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
}
# A family for each block and each activation; those of the seed's table, and two that only have a plan.
_FUSED_FAMILIES = (
    *("bert", "llama", "gpt2", "opt", "bloom", "t5", "chatglm2", "vit", "sam", "blip_2", "clip", "albert", "bart"),
    *("roberta_prelayernorm", "phi3", "gemma2"),
)


@pytest.fixture(autouse=True)
def _eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_compiled", lambda body, device: body)


def _inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_gradients_are_those_of_finite_differences() -> None:
    kept = nn.Dropout(0.0)
    for kind in _ACTIVATIONS:
        assert torch.autograd.gradcheck(partial(bias_activation, kind=kind), _inputs((2, 3, 5), (5,)), atol=2e-5)
        assert torch.autograd.gradcheck(partial(gated, kind=kind), _inputs((2, 3, 5), (2, 3, 5)), atol=2e-5)
    assert torch.autograd.gradcheck(partial(dropout_add, dropout=kept), _inputs((2, 3, 5), (2, 3, 5)))
    assert torch.autograd.gradcheck(lambda x, b, r: dropout_add(x, r, kept, b), _inputs((2, 3, 5), (5,), (2, 3, 5)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_are_those_of_torch(dtype: torch.dtype) -> None:
    gate, value, residual = (torch.randn(4, 7, 6).to(dtype) for _ in range(3))
    bias = torch.randn(6).to(dtype)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    for kind, activation in _ACTIVATIONS.items():
        torch.testing.assert_close(gated(gate, value, kind), activation(gate) * value, **tolerance)
        torch.testing.assert_close(bias_activation(gate, bias, kind), activation(gate + bias), **tolerance)
    dropout = nn.Dropout(0.3)
    torch.manual_seed(1)
    found = dropout_add(gate, residual, dropout, bias)
    torch.manual_seed(1)
    torch.testing.assert_close(found, residual + dropout(gate + bias), **tolerance)
    torch.manual_seed(1)
    found = dropout_add(gate, residual, dropout)
    torch.manual_seed(1)
    torch.testing.assert_close(found, residual + dropout(gate), **tolerance)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_compiled_operator_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_compiled", lambda body, device: torch.compile(body, dynamic=True))
    for length in (5, 9):
        gate, value = _inputs((2, length, 6), (2, length, 6))
        torch.testing.assert_close(gated(gate, value), F.silu(gate) * value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", _FUSED_FAMILIES)
def test_a_fused_model_computes_the_same(family: str) -> None:
    """Also on a single rank, where nothing is cut; names of parameters stay."""
    members = FAMILIES[family]
    dtype = DTYPES[members.precision]
    native = members.build(members.main_head, dtype)
    config = ShardConfig(enable_tensor_parallelism=False, enable_jit_fused=True)
    sharded, _ = ShardFormer(config).optimize(copy.deepcopy(native))
    batch = members.batch(members.main_head, 0, 4, dtype)
    expected, found = _first_output(native(**batch)), _first_output(sharded(**batch))
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, expected, **tolerance)
    found.square().mean().backward()
    expected.square().mean().backward()
    assert dict(native.named_parameters()).keys() == dict(sharded.named_parameters()).keys()
    for name, param in native.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(sharded.get_parameter(name).grad, param.grad, **tolerance)
    fused_kinds = ("_BiasActivation", "_Gated", "_DropoutAdd")
    assert any(kind in _graph(found) for kind in fused_kinds), "nothing was fused"


def _first_output(outputs: ModelOutput) -> Tensor:
    names = ("logits", "pred_masks", "logits_per_image")
    return next(outputs[name] for name in names if outputs.get(name) is not None)


def _graph(tensor: Tensor) -> str:
    """Names of the nodes behind a tensor."""
    seen, stack = set(), [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [parent for parent, _ in node.next_functions]
    return " ".join(node.name() for node in seen)
