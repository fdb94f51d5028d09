"""Elementwise operators fused into one pass over memory, forward and backward, equal to their eager forms.

The bodies are plain functions. `torch.compile` turns each into one kernel if a compiler is available (Triton on GPUs, a
C++ compiler on CPUs), with dynamic shapes so that a new length does not recompile. Otherwise, and under
TORCHDYNAMO_DISABLE=1, the same bodies run eagerly.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.layers.replicated_linear import replicated_linear
from shardformer.utils.derived_modules import derive

_log = logging.getLogger(__name__)
_SQRT_HALF, _SQRT_2_PI, _CUBIC = math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715


def has_compiler(device: str) -> bool:
    """Return whether `torch.compile` can build kernels for the device: Triton for GPUs, a C++ compiler for CPUs."""
    if device == "cuda":
        return importlib.util.find_spec("triton") is not None
    return any(shutil.which(name) for name in ("g++", "c++"))


@cache
def _compiled(body: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Compile `body` to one kernel; return it unchanged if there is no compiler."""
    if not has_compiler(device):
        _log.info("no compiler for %s: %s runs eagerly", device, body.__name__)
        return body
    return torch.compile(body, dynamic=True)


def _run(body: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
    # Detached: if inputs required a gradient, the compiler would trace its own backward pass, including the hooks of
    # activation checkpointing.
    plain = [value.detach() if isinstance(value, Tensor) else value for value in (x, *rest)]
    return _compiled(body, x.device.type)(*plain)


def _swiglu_body(gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(gate) * value


def _swiglu_backward_body(grad: Tensor, gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return grad * value * (sigmoid + silu * (1 - sigmoid)), grad * silu


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gate, value)
        return _run(_swiglu_body, gate, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, value = ctx.saved_tensors
        return _run(_swiglu_backward_body, grad, gate, value)


def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """Compute silu(gate) * value (arXiv 2002.05202) on tensors of equal shape."""
    if torch.compiler.is_compiling():  # a graph around it fuses the body with more
        return _swiglu_body(gate, value)
    return _SwiGLU.apply(gate, value)


def _gelu_erf_body(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def _gelu_tanh_body(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def _gelu_erf_backward_body(grad: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    x = x + bias
    density = torch.exp(-0.5 * x * x) * (_SQRT_2_PI / 2)
    return grad * (0.5 * (1 + torch.erf(x * _SQRT_HALF)) + x * density)


def _gelu_tanh_backward_body(grad: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    x = x + bias
    tanh = torch.tanh(_SQRT_2_PI * (x + _CUBIC * x * x * x))
    slope = _SQRT_2_PI * (1 + 3 * _CUBIC * x * x)
    return grad * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope)


_GELU = {"none": (_gelu_erf_body, _gelu_erf_backward_body), "tanh": (_gelu_tanh_body, _gelu_tanh_backward_body)}


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.approximate = approximate
        return _run(_GELU[approximate][0], x, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, bias = ctx.saved_tensors
        grad_x = _run(_GELU[ctx.approximate][1], grad, x, bias)
        return grad_x, grad_x.flatten(0, -2).sum(0), None


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """Compute gelu(x + bias) (arXiv 1606.08415): "none" uses the error function, "tanh" its approximation.

    The two are never swapped. x: [..., features], bias: [features].
    """
    if torch.compiler.is_compiling():
        return _GELU[approximate][0](x, bias.to(x.dtype))
    return _BiasGelu.apply(x, bias.to(x.dtype), approximate)


def _bias_dropout_add_body(x: Tensor, bias: Tensor, keep: Tensor, residual: Tensor) -> Tensor:
    return (x + bias) * keep + residual


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, keep: Tensor, residual: Tensor) -> Tensor:
        ctx.save_for_backward(keep)
        return _run(_bias_dropout_add_body, x, bias, keep, residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        (keep,) = ctx.saved_tensors
        grad_x = grad * keep
        return grad_x, grad_x.flatten(0, -2).sum(0), None, grad


def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, dropout: nn.Module) -> Tensor:
    """Compute residual + dropout(x + bias); all [..., features], bias [features].

    `dropout` itself draws the mask, from its own random stream, as it would without the fusion.
    """
    active = dropout.training and dropout.p > 0
    keep = dropout(torch.ones_like(x)) if active else torch.ones((), dtype=x.dtype, device=x.device)
    if torch.compiler.is_compiling():
        return _bias_dropout_add_body(x, bias.to(x.dtype), keep, residual)
    return _BiasDropoutAdd.apply(x, bias.to(x.dtype), keep, residual)


# ----- installing the fused operators in modules -----


def fuse_gated_mlp(mlp: nn.Module) -> nn.Module | None:
    """Fuse the activation of Llama's feed-forward; return the module that replaces it, None if it stays."""
    if type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation") or "forward" in vars(mlp):
        return None
    return derive(mlp, _FusedGatedMLP)


def fuse_bias_gelu(module: nn.Module, linear: str, activation: str) -> None:
    """Let the activation after a linear layer add that layer's bias."""
    kind = _gelu_kind(getattr(module, activation))
    if kind is not None and _leave_bias_out(module, linear):
        setattr(module, activation, _BiasActivation(getattr(module, linear), kind))


def fuse_output(module: nn.Module) -> nn.Module | None:
    """Fuse BERT's output block: linear, dropout, then the norm of the sum with the block's input.

    Returns:
        The module that replaces the block, because the sum is between two modules; None if the block stays.
    """
    if "forward" in vars(module) or not _leave_bias_out(module, "dense"):
        return None
    return derive(module, _FusedOutput)


class _FusedGatedMLP(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class _FusedOutput(nn.Module):
    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        found = self.dense(hidden_states)
        return self.LayerNorm(bias_dropout_add(found, self.dense.bias, input_tensor, self.dropout))


class _BiasActivation(nn.Module):
    """gelu(x + bias) with the bias of a linear layer, which stays that layer's parameter."""

    def __init__(self, linear: nn.Module, approximate: str) -> None:
        super().__init__()
        self.__dict__["linear"] = linear  # not a submodule: its parameters must have one name
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return bias_gelu(x, self.linear.bias, self.approximate)


def _gelu_kind(activation: Any) -> str | None:
    """Return the kind of GELU of an activation; None for another activation."""
    name = type(activation).__name__
    if name in ("GELUActivation", "GELU"):
        return getattr(activation, "approximate", "none")
    return {"NewGELUActivation": "tanh", "GELUTanh": "tanh", "PytorchGELUTanh": "tanh"}.get(name)


def _leave_bias_out(module: nn.Module, name: str) -> bool:
    """Let a linear layer of `module` return its product without the bias, which the consumer adds.

    Returns:
        False if that cannot be: the layer has no bias, or a forward of its own.
    """
    native = getattr(module, name)
    layer = native if hasattr(native, "adds_bias") else replicated_linear(native)
    if layer is None or layer.bias is None:
        return False
    setattr(module, name, layer)
    layer.adds_bias = False
    return True
