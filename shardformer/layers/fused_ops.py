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
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


@cache
def _of_kind(body: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Return `body` for one `kind`, as code of its own: the compiler limits how often it compiles the same code."""
    code = body.__code__.replace(co_name=f"{body.__name__}_{kind}")
    return FunctionType(code, body.__globals__, code.co_name, argdefs=(kind,))


def _run(body: Callable[..., Any], x: Tensor, *rest: Tensor, kind: str | None = None) -> Any:
    # Detached: if inputs required a gradient, the compiler would trace its own backward pass, including the hooks of
    # activation checkpointing.
    body = body if kind is None else _of_kind(body, kind)
    # Where the compiler is disabled, `torch.compile` would still import all of it, for seconds.
    run = body if torch._dynamo.config.disable else _compiled(body, x.device.type)
    return run(x.detach(), *(value.detach() for value in rest))


def _silu_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(x)
    silu = x * sigmoid
    return silu, sigmoid + silu * (1 - sigmoid)


def _erf_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    cumulative = 0.5 * (1 + torch.erf(x * _SQRT_HALF))
    return x * cumulative, cumulative + x * torch.exp(-0.5 * x * x) * (_SQRT_2_PI / 2)


def _tanh_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    tanh = torch.tanh(_SQRT_2_PI * (x + _CUBIC * x * x * x))
    slope = _SQRT_2_PI * (1 + 3 * _CUBIC * x * x)
    return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope


def _bloom_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    tanh = torch.tanh(0.79788456 * x * (1 + _CUBIC * x * x))  # the digits that BLOOM's own code has
    slope = 0.79788456 + 0.1070322243 * x * x
    return x * 0.5 * (1 + tanh), 0.5 * x * ((1 - tanh * tanh) * slope) + 0.5 * (1 + tanh)


def _quick_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(1.702 * x)
    return x * sigmoid, sigmoid + 1.702 * x * sigmoid * (1 - sigmoid)


def _relu_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.relu(x), (x > 0).to(x.dtype)


# Kind of activation -> the function of x that returns its value and its derivative.
_SLOPES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "silu": _silu_slope,
    "none": _erf_slope,
    "tanh": _tanh_slope,
    "bloom": _bloom_slope,
    "quick": _quick_slope,
    "relu": _relu_slope,
}
_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "none": F.gelu,
    "tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def _value(x: Tensor, kind: str) -> Tensor:
    return _VALUES[kind](x) if kind in _VALUES else _SLOPES[kind](x)[0]


def _gated_body(gate: Tensor, value: Tensor, kind: str) -> Tensor:
    return _value(gate, kind) * value


def _gated_backward_body(grad: Tensor, gate: Tensor, value: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    activated, slope = _SLOPES[kind](gate)
    return grad * value * slope, grad * activated


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(gate, value)
        ctx.kind = kind
        return _run(_gated_body, gate, value, kind=kind)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, value = ctx.saved_tensors
        return *_run(_gated_backward_body, grad, gate, value, kind=ctx.kind), None


def gated(gate: Tensor, value: Tensor, kind: str = "silu") -> Tensor:
    """Compute activation(gate) * value (gated linear units, arXiv 2002.05202) on tensors of equal shape.

    Args:
        gate, value: [..., features].
        kind: "silu", or a GELU: "none" for the error function, "tanh" for its approximation.
    """
    if torch.compiler.is_compiling():  # a graph around it fuses the body with more
        return _gated_body(gate, value, kind)
    return _Gated.apply(gate, value, kind)


def _bias_activation_body(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    return _value(x + bias, kind)


def _bias_activation_backward_body(grad: Tensor, x: Tensor, bias: Tensor, kind: str) -> Tensor:
    return grad * _SLOPES[kind](x + bias)[1]


class _BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.kind = kind
        return _run(_bias_activation_body, x, bias, kind=kind)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, bias = ctx.saved_tensors
        grad_x = _run(_bias_activation_backward_body, grad, x, bias, kind=ctx.kind)
        return grad_x, grad_x.flatten(0, -2).sum(0), None


def bias_activation(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """Compute activation(x + bias); x: [..., features], bias: [features].

    Args:
        x, bias: the product of a linear layer, and its bias.
        kind: "none" (GELU with the error function, arXiv 1606.08415), "tanh" (its approximation), "bloom" (the same
            with the rounded constants of BLOOM), "quick" (CLIP's x * sigmoid(1.702 x)), "relu" or "silu". They are
            never swapped.
    """
    if torch.compiler.is_compiling():
        return _bias_activation_body(x, bias.to(x.dtype), kind)
    return _BiasActivation.apply(x, bias.to(x.dtype), kind)


def _bias_dropout_add_body(x: Tensor, bias: Tensor, keep: Tensor, residual: Tensor) -> Tensor:
    return (x + bias) * keep + residual


def _dropout_add_body(x: Tensor, keep: Tensor, residual: Tensor) -> Tensor:
    return x * keep + residual


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, keep: Tensor, residual: Tensor) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.has_bias = bias is not None
        if bias is None:
            return _run(_dropout_add_body, x, keep, residual)
        return _run(_bias_dropout_add_body, x, bias, keep, residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor]:
        grad_x = grad * ctx.saved_tensors[0]
        return grad_x, grad_x.flatten(0, -2).sum(0) if ctx.has_bias else None, None, grad


def dropout_add(x: Tensor, residual: Tensor, dropout: nn.Module, bias: Tensor | None = None) -> Tensor:
    """Compute residual + dropout(x + bias), [..., features], bias [features]; `dropout` draws the mask as unfused."""
    keep, bias = _mask_of(dropout, x), None if bias is None else bias.to(x.dtype)
    if not torch.compiler.is_compiling():
        return _DropoutAdd.apply(x, bias, keep, residual)
    return _dropout_add_body(x if bias is None else x + bias, keep, residual)


def _mask_of(dropout: nn.Module, x: Tensor) -> Tensor:
    """Return the factors of a dropout module for `x`; a 0-d one if it drops nothing."""
    if dropout.training and dropout.p > 0:
        return dropout(torch.ones_like(x))
    return torch.ones((), dtype=x.dtype, device=x.device)
