"""The matrix products of linear layers: as torch does them, or in 8 bit.

A layer says by which products it runs (`using`) for the time of its forward pass; the autograd nodes of the linear
layers remember it for their backward pass. In 8 bit (Micikevicius et al., arXiv 2209.05433) activations and weights are
rounded to e4m3 and gradients to e5m2, each tensor by a scale of its own that puts its largest value at the end of the
range; sums are in fp32, and what comes out is in the precision of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MULTIPLE = 16  # of the sizes that the 8-bit kernels take


class MatmulBackend:
    """The three products of y = x W^T + b; weights are [out, in]."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., in] -> [..., out], for autograd nodes of our own."""
        return no_view(F.linear(x, weight, bias))

    def grad_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the output, [tokens, out] -> of the input, [tokens, in]."""
        return grad @ weight

    def add_grad_input(self, total: Tensor, grad: Tensor, weight: Tensor) -> None:
        """The same, added to `total`."""
        total.addmm_(grad, weight)

    def grad_weight(self, grad: Tensor, x: Tensor, transposed: bool = False) -> Tensor:
        """Gradient [tokens, out] and input [tokens, in] -> the gradient of W, [out, in], or of its transpose."""
        return x.t() @ grad if transposed else grad.t() @ x

    def write_grad_weight(self, place: Tensor, adds: bool, grad: Tensor, x: Tensor, transposed: bool = False) -> None:
        """The same, written to `place` or added to what is there."""
        first, second = (x.t(), grad) if transposed else (grad.t(), x)
        place.addmm_(first, second, beta=int(adds))


class Float8Matmul(MatmulBackend):
    """In 8 bit where the sizes are multiples of 16, else as torch does them."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if not _fits(flat, *weight.shape):
            return super().forward(x, weight, bias)
        out = _multiply(_Rounded(flat), _Rounded(weight), x.dtype)
        out = out if bias is None else out.add_(bias)
        return no_view(out.view(*x.shape[:-1], out.shape[-1]))

    def grad_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        if not _fits(grad, *weight.shape):
            return super().grad_input(grad, weight)
        return _multiply(_Rounded(grad, is_gradient=True), _Rounded(weight).transposed(), grad.dtype)

    def add_grad_input(self, total: Tensor, grad: Tensor, weight: Tensor) -> None:
        total.add_(self.grad_input(grad, weight))

    def grad_weight(self, grad: Tensor, x: Tensor, transposed: bool = False) -> Tensor:
        if not _fits(grad, grad.shape[1], x.shape[1]):
            return super().grad_weight(grad, x, transposed)
        missing = -len(grad) % _MULTIPLE  # tokens are what is summed over here
        factors = [_Rounded(F.pad(grad, (0, 0, 0, missing)), is_gradient=True), _Rounded(F.pad(x, (0, 0, 0, missing)))]
        first, second = reversed(factors) if transposed else factors
        return _multiply(first.transposed(), second.transposed(), grad.dtype)


def no_view(x: Tensor) -> Tensor:
    """The same values in the same memory: what follows may work in place on what an autograd node returns."""
    return torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x


NATIVE, FP8 = MatmulBackend(), Float8Matmul()
_current: list[MatmulBackend] = [NATIVE]


def current_matmul_backend() -> MatmulBackend:
    """Those of the layer that runs."""
    return _current[-1]


@contextmanager
def using(products: MatmulBackend) -> Iterator[None]:
    """A forward pass by these products."""
    _current.append(products)
    try:
        yield
    finally:
        _current.pop()


def use_matmul_backend(module: nn.Module, products: MatmulBackend) -> None:
    """Let a layer run by `products`."""
    module.forward = partial(_by, products, module.forward)  # no closure: a copy of the layer calls its own


def _by(products: MatmulBackend, native: Callable[..., Tensor], x: Tensor) -> Tensor:
    with using(products):
        return native(x)


class _Rounded:
    """A matrix in 8 bit.

    Args:
        x: [rows, columns].
        is_gradient: gradients need range, values precision.
    """

    def __init__(self, x: Tensor, is_gradient: bool = False) -> None:
        dtype = torch.float8_e5m2 if is_gradient else torch.float8_e4m3fn
        largest = torch.finfo(dtype).max
        # A matrix of zeros has no largest value to scale by.
        self.scale = (x.detach().abs().amax().float() / largest).clamp(min=torch.finfo(torch.float32).tiny)
        self.values = (x.float() / self.scale).clamp(-largest, largest).to(dtype)

    def transposed(self) -> _Rounded:
        """The transpose, contiguous as the kernels want it."""
        self.values = self.values.t().contiguous()
        return self


def _multiply(first: _Rounded, second: _Rounded, dtype: torch.dtype) -> Tensor:
    """first @ second^T, [rows, columns] and [others, columns] -> [rows, others]."""
    return torch._scaled_mm(first.values, second.values.t(), scale_a=first.scale, scale_b=second.scale, out_dtype=dtype)


def _fits(x: Tensor, *sizes: int) -> bool:
    return len(x) > 0 and x.dtype in (torch.bfloat16, torch.float32) and all(size % _MULTIPLE == 0 for size in sizes)
