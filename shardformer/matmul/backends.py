"""Backends of the matrix products of linear layers: native torch, or FP8.

Each linear layer has a backend (`MatmulLayer.matmul_backend`); its autograd nodes remember it for the backward pass. In
FP8 (Micikevicius et al., arXiv 2209.05433), activations and weights are rounded to e4m3 and
gradients to e5m2, with one scale per tensor that maps its largest value to the end of the range. Sums are in fp32, and
outputs have the precision of the input. On a GPU, sums of the forward pass may be kept in the tensor cores
(`use_fast_accum`), which rounds them slightly earlier; those of gradients are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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

    def __init__(self) -> None:
        # Parameter -> its version, and its rounded values; None outside of `reusing_weights`.
        self._weights: dict[nn.Parameter, tuple[int, _Rounded]] | None = None
        # Whether a gradient -> the last one, or the last activation, its version, and its rounded values.
        self._latest: dict[bool, tuple[Tensor, int, _Rounded]] = {}

    @contextmanager
    def reusing_weights(self) -> Iterator[None]:
        """Round each parameter once in this context, in which nothing may write to the memory of parameters.

        The version of a parameter does not tell of all writes: its memory is part of a bucket, which is written as a
        whole. The rounded values take one byte per element until the context ends. The last activation and the last
        gradient are kept, too: layers that read one input share its rounding, and a gradient has two products.
        """
        outer, self._weights = self._weights, {} if self._weights is None else self._weights
        try:
            yield
        finally:
            self._weights = outer
            self._latest.clear()

    def _rounded(self, x: Tensor, is_gradient: bool = False) -> _Rounded:
        """Return rounded `x`, [rows, columns], an activation or a gradient."""
        if self._weights is None or x.is_inference():
            return _Rounded(x, is_gradient)
        known = self._latest.get(is_gradient)
        if known is None or not _is_same(x, *known[:2]):
            known = self._latest[is_gradient] = (x.detach(), x._version, _Rounded(x, is_gradient))
        return known[2]

    def _rounded_weight(self, weight: Tensor) -> _Rounded:
        """Return rounded `weight`, [out, in]: a parameter, its transpose, or a tensor that was made for one product."""
        parameter = weight._base if weight._is_view() else weight
        is_transposed = parameter is not weight
        if self._weights is None or not isinstance(parameter, nn.Parameter) or not _is_whole(weight, parameter):
            return _Rounded(weight)
        version, known = self._weights.get(parameter, (None, None))
        if version != parameter._version:
            known = _Rounded(parameter.detach())
            self._weights[parameter] = parameter._version, known
        return known.transposed() if is_transposed else known

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply in FP8: [..., in] -> [..., out]."""
        flat = x.reshape(-1, x.shape[-1])
        if not _fits(flat, *weight.shape):
            return super().forward(x, weight, bias)
        out = _multiply(self._rounded(flat), self._rounded_weight(weight), x.dtype, is_forward=True)
        out = out if bias is None else out + bias
        return no_view(out.view(*x.shape[:-1], out.shape[-1]))

    def grad_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Compute the input gradient in FP8, [tokens, in]."""
        if not _fits(grad, *weight.shape):
            return super().grad_input(grad, weight)
        rounded = self._rounded(grad, is_gradient=True)
        return _multiply(rounded, self._rounded_weight(weight).transposed(), grad.dtype)

    def add_grad_input(self, total: Tensor, grad: Tensor, weight: Tensor) -> None:
        """Add the input gradient, computed in FP8, to `total`."""
        total.add_(self.grad_input(grad, weight))

    def grad_weight(self, grad: Tensor, x: Tensor, transposed: bool = False) -> Tensor:
        """Compute the weight gradient in FP8, [out, in] or its transpose."""
        if not _fits(grad, grad.shape[1], x.shape[1]):
            return super().grad_weight(grad, x, transposed)
        missing = -len(grad) % _MULTIPLE  # products sum over tokens here, so pad them
        factors = [self._rounded(grad, is_gradient=True).padded(missing), self._rounded(x).padded(missing)]
        first, second = reversed(factors) if transposed else factors
        return _multiply(first.transposed(), second.transposed(), grad.dtype)


def no_view(x: Tensor) -> Tensor:
    """Return `x`, in the same memory, as a tensor that is not a view: allows in-place operators on a node's output."""
    return torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x


NATIVE, FP8 = MatmulBackend(), Float8Matmul()


class _Rounded:
    """A matrix rounded to FP8, with one scale.

    Attributes:
        values: [rows, columns], contiguous, as the kernels require.
        scale: factor of the values, 0-d.
    """

    def __init__(self, x: Tensor, is_gradient: bool = False) -> None:
        """Round `x`, [rows, columns], to e5m2 if it is a gradient, which needs range, and else to e4m3.

        No value is beyond the end of the range by more than the rounding of a division, which e4m3 and e5m2 round back.
        """
        dtype = torch.float8_e5m2 if is_gradient else torch.float8_e4m3fn
        largest = torch.finfo(dtype).max
        # One pass, and no temporary for absolute values. fp32, because 16-bit quotients would be rounded twice.
        peak = torch.linalg.vector_norm(x.detach(), torch.inf, dtype=torch.float32)
        # Clamp, because a matrix of zeros has no largest value to scale by.
        self.scale = (peak / largest).clamp(min=torch.finfo(torch.float32).tiny)
        quotient = x / self.scale if x.dtype == torch.float32 else x.float().div_(self.scale)
        self.values = quotient.to(dtype)

    def transposed(self) -> _Rounded:
        """Return the transpose, in memory of its own."""
        result = object.__new__(_Rounded)
        result.scale, result.values = self.scale, self.values.t().contiguous()
        return result

    def padded(self, missing: int) -> _Rounded:
        """Return the matrix with `missing` further rows of zeros."""
        if missing == 0:
            return self
        result = object.__new__(_Rounded)
        # As bytes, which every device can copy; a zero is the byte 0 in both formats.
        padded = F.pad(self.values.view(torch.uint8), (0, 0, 0, missing)).view(self.values.dtype)
        result.scale, result.values = self.scale, padded
        return result


def _multiply(first: _Rounded, second: _Rounded, dtype: torch.dtype, is_forward: bool = False) -> Tensor:
    """Compute first @ second^T, [rows, columns] and [others, columns] -> [rows, others]."""
    return torch._scaled_mm(
        first.values,
        second.values.t(),
        scale_a=first.scale,
        scale_b=second.scale,
        out_dtype=dtype,
        use_fast_accum=is_forward and first.values.is_cuda,
    )


def _is_whole(weight: Tensor, parameter: Tensor) -> bool:
    """Return whether `weight` is `parameter` itself or its transpose."""
    if weight is parameter:
        return True
    same_place = weight.data_ptr() == parameter.data_ptr() and weight.dim() == parameter.dim() == 2
    return same_place and weight.shape == parameter.t().shape and weight.stride() == parameter.t().stride()


def _is_same(x: Tensor, known: Tensor, version: int) -> bool:
    """Return whether `x` has the values that `known`, whose memory is still in use, had at `version`."""
    same_place = x.data_ptr() == known.data_ptr() and x.shape == known.shape and x.stride() == known.stride()
    return same_place and x.dtype == known.dtype and x._version == known._version == version


def _fits(x: Tensor, *sizes: int) -> bool:
    return len(x) > 0 and x.dtype in (torch.bfloat16, torch.float32) and all(size % _MULTIPLE == 0 for size in sizes)
