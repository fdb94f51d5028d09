"""Backends of the matrix products of linear layers: native torch, or FP8.

Each linear layer has a backend (`MatmulLayer.matmul_backend`); its autograd nodes remember it for the backward pass. In
FP8 (Micikevicius et al., arXiv 2209.05433), activations and weights are rounded to e4m3 and
gradients to e5m2, with one scale per tensor that maps its largest value to the end of the range. Sums are in fp32, and
outputs have the precision of the input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_MULTIPLE = 16  # FP8 kernels need sizes that are multiples of this


class MatmulBackend:
    """The three products of y = x W^T + b in native torch; weights are [out, in]."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute [..., in] -> [..., out], for the autograd nodes of this package."""
        return no_view(F.linear(x, weight, bias))

    def grad_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Compute the input gradient, [tokens, in], from the output gradient, [tokens, out]."""
        return grad @ weight

    def add_grad_input(self, total: Tensor, grad: Tensor, weight: Tensor) -> None:
        """Add the input gradient to `total`."""
        total.addmm_(grad, weight)

    def grad_weight(self, grad: Tensor, x: Tensor, transposed: bool = False) -> Tensor:
        """Compute the gradient of W, [out, in], or of its transpose, from output gradient [tokens, out] and input."""
        return x.t() @ grad if transposed else grad.t() @ x

    def write_grad_weight(self, place: Tensor, adds: bool, grad: Tensor, x: Tensor, transposed: bool = False) -> None:
        """Write the gradient of W, or of its transpose, to `place`, or add it to the contents of `place`."""
        first, second = (x.t(), grad) if transposed else (grad.t(), x)
        place.addmm_(first, second, beta=int(adds))


class Float8Matmul(MatmulBackend):
    """Products in FP8 if all sizes are multiples of 16, else in native torch."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply in FP8: [..., in] -> [..., out]."""
        flat = x.reshape(-1, x.shape[-1])
        if not _fits(flat, *weight.shape):
            return super().forward(x, weight, bias)
        out = _multiply(_Rounded(flat), _Rounded(weight), x.dtype)
        out = out if bias is None else out.add_(bias)
        return no_view(out.view(*x.shape[:-1], out.shape[-1]))

    def grad_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Compute the input gradient in FP8, [tokens, in]."""
        if not _fits(grad, *weight.shape):
            return super().grad_input(grad, weight)
        return _multiply(_Rounded(grad, is_gradient=True), _Rounded(weight).transposed(), grad.dtype)

    def add_grad_input(self, total: Tensor, grad: Tensor, weight: Tensor) -> None:
        """Add the input gradient, computed in FP8, to `total`."""
        total.add_(self.grad_input(grad, weight))

    def grad_weight(self, grad: Tensor, x: Tensor, transposed: bool = False) -> Tensor:
        """Compute the weight gradient in FP8, [out, in] or its transpose."""
        if not _fits(grad, grad.shape[1], x.shape[1]):
            return super().grad_weight(grad, x, transposed)
        missing = -len(grad) % _MULTIPLE  # products sum over tokens here, so pad them
        factors = [_Rounded(F.pad(grad, (0, 0, 0, missing)), is_gradient=True), _Rounded(F.pad(x, (0, 0, 0, missing)))]
        first, second = reversed(factors) if transposed else factors
        return _multiply(first.transposed(), second.transposed(), grad.dtype)


def no_view(x: Tensor) -> Tensor:
    """Return `x`, in the same memory, as a tensor that is not a view: allows in-place operators on a node's output."""
    return torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x


NATIVE, FP8 = MatmulBackend(), Float8Matmul()


class _Rounded:
    """A matrix rounded to FP8, with one scale.

    Args:
        x: [rows, columns].
        is_gradient: selects e5m2 instead of e4m3, since gradients need range and values need precision.
    """

    def __init__(self, x: Tensor, is_gradient: bool = False) -> None:
        dtype = torch.float8_e5m2 if is_gradient else torch.float8_e4m3fn
        largest = torch.finfo(dtype).max
        # Clamp, because a matrix of zeros has no largest value to scale by.
        self.scale = (x.detach().abs().amax().float() / largest).clamp(min=torch.finfo(torch.float32).tiny)
        self.values = (x.float() / self.scale).clamp(-largest, largest).to(dtype)

    def transposed(self) -> _Rounded:
        """Transpose in place, and make the result contiguous as the kernels require."""
        self.values = self.values.t().contiguous()
        return self


def _multiply(first: _Rounded, second: _Rounded, dtype: torch.dtype) -> Tensor:
    """Compute first @ second^T, [rows, columns] and [others, columns] -> [rows, others]."""
    return torch._scaled_mm(first.values, second.values.t(), scale_a=first.scale, scale_b=second.scale, out_dtype=dtype)


def _fits(x: Tensor, *sizes: int) -> bool:
    return len(x) > 0 and x.dtype in (torch.bfloat16, torch.float32) and all(size % _MULTIPLE == 0 for size in sizes)
