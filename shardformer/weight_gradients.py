"""The second half of a backward pass: gradients of the matrices of linear layers, put off until they are asked for.

Nobody waits for them, so that zero-bubble pipelines (Qi et al., arXiv 2401.10241) send the gradients of activations on
their way first and fill their pauses with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardformer.products import NATIVE, Products, current_products

# (the parameter, what computes its gradient)
PutOff = list[tuple[nn.Parameter, Callable[[], Tensor]]]


class _State:
    """Of this process: passes of a pipeline run one at a time."""

    splits = False
    put_off: PutOff | None = None


@contextmanager
def splitting_backward(put_off: PutOff | None = None) -> Iterator[None]:
    """A forward pass whose backward pass may come in halves; with a list, the first half, which leaves the rest there.

    Recomputation runs forward passes inside of the first half.
    """
    before = _State.splits, _State.put_off
    _State.splits, _State.put_off = True, put_off
    try:
        yield
    finally:
        _State.splits, _State.put_off = before


def finish_backward(put_off: PutOff) -> None:
    """The second half: compute what was put off and add it to the gradients of the parameters, hooks included."""
    for parameter, compute in put_off:
        torch.autograd.backward(parameter, compute())
    put_off.clear()


def weight_gradient(weight: Tensor, flat_grad: Tensor, flat_x: Tensor, products: Products = NATIVE) -> Tensor | None:
    """The gradient of `weight` in y = x W^T, now; None in the first half of a backward pass, which puts it off.

    Args:
        weight: [out, in]; a parameter, or the transpose of one.
        flat_grad: of the output, [tokens, out].
        flat_x: the input, [tokens, in].
        products: of the layer.
    """
    parameter = weight if weight.is_leaf else _transposed(weight)
    if _State.put_off is None or parameter is None:
        return products.of_weight(flat_grad, flat_x)
    is_transposed = parameter is not weight
    _State.put_off.append((parameter, lambda: products.of_weight(flat_grad, flat_x, is_transposed)))
    return None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: [..., in] -> [..., out]."""
    is_native = not _State.splits and current_products() is NATIVE
    return F.linear(x, weight, bias) if is_native else _SplitLinear.apply(x, weight, bias)


def split_native_layers(model: nn.Module) -> None:
    """Let the layers of `model` that are torch's and transformers' own put off the gradients of their matrices too."""
    for module in model.modules():
        own_products(module)


def own_products(module: nn.Module) -> bool:
    """Let a linear layer of torch or transformers multiply by `linear`; whether it is one."""
    if type(module).forward is nn.Linear.forward:
        module.forward = _forward_of(module, transposed=False)
    elif type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        module.forward = _forward_of(module, transposed=True)
    else:
        return False
    return True


def matrix(x: Tensor) -> Tensor:
    """[..., features] -> [tokens, features], also where a rank's piece has no features at all."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _transposed(weight: Tensor) -> Tensor | None:
    """The parameter that `weight` is the transpose of; None if it is anything else."""
    base = weight._base
    if base is None or not base.is_leaf or weight.dim() != 2 or weight.shape != base.t().shape:
        return None
    same = weight.stride() == base.t().stride() and weight.storage_offset() == base.storage_offset()
    return base if same else None


def is_native_linear(module: nn.Module) -> bool:
    """Whether `module` computes x W^T + b as `nn.Linear` does, and nobody but us has given it a forward of its own."""
    own = vars(module).get("forward")
    return type(module).forward is nn.Linear.forward and (own is None or getattr(own, "__module__", "") == __name__)


def _forward_of(module: nn.Module, transposed: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: linear(x, module.weight.t() if transposed else module.weight, module.bias)


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # a saved tensor forgets whose transpose it is
        ctx.products = current_products()
        return ctx.products.forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
        flat = matrix(grad)
        grad_x = ctx.products.of_input(flat, weight).view_as(x) if needs[0] else None
        grad_weight = weight_gradient(ctx.weight, flat, matrix(x), ctx.products) if needs[1] else None
        return grad_x, grad_weight, flat.sum(0) if needs[2] else None
