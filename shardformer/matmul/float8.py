"""Products in FP8.

Matrices are rounded, with scales that map their largest value to the end of the range (Micikevicius et al., arXiv
2209.05433). Sums are in fp32, and outputs have the precision of the input. On a GPU, sums of the forward pass may be
kept in the tensor cores (`use_fast_accum`), which rounds them slightly earlier; those of gradients are not. Of the
recipes,
- "tensorwise" has one scale for each matrix; activations and weights are e4m3, and gradients e5m2, for its range;
- "rowwise" has a scale for each row along which a product sums, and all is e4m3; weight gradients are native products,
  for they sum over the most values, and both factors would have to be rounded again, by columns;
- "mxfp8" has a power of two for each 32 values along which a product sums (OCP Microscaling Formats 1.0), all in e4m3.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache, partial
from itertools import count, pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from shardformer.distributed.collectives import all_gather_dim
from shardformer.distributed.sequence_parallel import SEQ_DIM, SequenceParallel
from shardformer.matmul.kernel import matrix, no_view, runs_on
from shardformer.matmul.native import Native, RoundedGather, RoundedLinear
from shardformer.utils.untraced import defines_operators

_NUMBERS = count()  # of kernels
_BLOCK = 32  # values with one scale in mxfp8


@cache
def round_on_gpus() -> Callable[[Tensor, bool, Tensor | None], tuple[Tensor, Tensor, Tensor]]:
    """Define the operator `booster::round_to_fp8`: see `Rounded` -> values, their transpose, scale (0-d).

    When it is first used, as `torch.library` looks through all modules.
    """

    @torch.library.custom_op("booster::round_to_fp8", mutates_args=())
    def round_to_fp8(x: Tensor, is_gradient: bool, peak: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        found = empty(x, is_gradient, peak)
        importlib.import_module("shardformer.matmul.float8_cast").round_into(x.contiguous(), peak, *found)
        return found

    def empty(x: Tensor, is_gradient: bool, peak: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.float8_e5m2 if is_gradient else torch.float8_e4m3fn
        values, columns = (x.new_empty(shape, dtype=dtype) for shape in (x.shape, x.shape[::-1]))
        return values, columns, x.new_empty((), dtype=torch.float32)

    round_to_fp8.register_fake(empty)
    return torch.ops.booster.round_to_fp8


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class Rounded:
    """A matrix rounded to FP8, with one scale.

    Attributes:
        values: [rows, columns], contiguous, as the kernels require.
        scale: factor of the values, 0-d.
    """

    def __init__(self, x: Tensor, is_gradient: bool = False, peak: Tensor | None = None) -> None:
        """Round `x`, [rows, columns], to e5m2 if it is a gradient, which needs range, and else to e4m3.

        No value is beyond the end of the range by more than the rounding of a division, which e4m3 and e5m2 round back.

        Args:
            peak: the largest absolute value, 0-d in fp32, of a matrix that `x` is a part of; None if it is the whole.
        """
        self._columns: Tensor | None = None  # the values, transposed
        if runs_on(x.device) == "cuda" and (_has_triton() or not x.is_cuda):  # a plan needs no Triton
            self.values, self._columns, self.scale = round_on_gpus()(x.detach(), is_gradient, peak)
            return
        dtype = torch.float8_e5m2 if is_gradient else torch.float8_e4m3fn
        if peak is None:  # one pass, and no temporary for absolute values
            peak = torch.linalg.vector_norm(x.detach(), torch.inf, dtype=torch.float32)
        self.scale = scale_of(peak, dtype)
        # In fp32, because 16-bit quotients would be rounded twice.
        self.values = (x / self.scale.view(1, 1)).to(dtype)  # a scale with dims makes a quotient in fp32, in one pass

    @staticmethod
    def of(values: Tensor, scale: Tensor) -> Rounded:
        """Return a matrix that is rounded already, [rows, columns] and 0-d."""
        result = object.__new__(Rounded)
        result.values, result.scale, result._columns = values, scale, None
        return result

    def transposed(self) -> Rounded:
        """Return the transpose, in memory of its own."""
        columns = self.values.t().contiguous() if self._columns is None else self._columns
        return self._with(columns, self.values)

    def _with(self, values: Tensor, columns: Tensor | None = None) -> Rounded:
        result = Rounded.of(values, self.scale)
        result._columns = columns
        return result

    def times(self, other: Rounded, dtype: torch.dtype, is_forward: bool = False) -> Tensor:
        """Compute self @ other^T, [rows, columns] and [others, columns] -> [rows, others]."""
        return torch._scaled_mm(
            self.values,
            other.values.t(),
            scale_a=self.scale,
            scale_b=other.scale,
            out_dtype=dtype,
            use_fast_accum=is_forward and self.values.is_cuda,
        )

    def padded(self, missing: int) -> Rounded:
        """Return the matrix with `missing` further rows of zeros."""
        if missing == 0:
            return self
        # As bytes, which every device can copy; a zero is the byte 0 in both formats.
        return self._with(F.pad(self.values.view(torch.uint8), (0, 0, 0, missing)).view(self.values.dtype))


class RoundedTokens(Rounded):
    """Tokens, or their gradient, [tokens, features], of which each rank has rounded a part.

    Attributes:
        shape, dtype: those of the tokens before they were rounded.
    """

    def __init__(self, values: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.values, self.scale, self.dtype, self._columns = values, scale, dtype, None
        self.shape = values.shape

    def __len__(self) -> int:
        return self.shape[0]

    def transposed(self) -> Rounded:
        """Return the transpose, which is made once."""
        if self._columns is None:
            self._columns = self.values.t().contiguous()
        return super().transposed()


class _RoundedRows(Rounded):
    """A matrix rounded to e4m3, with a scale for each row, [rows, 1]; on a CPU products are those of fp32 values."""

    def __init__(self, x: Tensor, is_gradient: bool = False) -> None:
        """Round `x`, [rows, columns]."""
        self._source, self._transposed = x.detach(), None
        dtype = torch.float8_e4m3fn
        peak = torch.linalg.vector_norm(self._source, torch.inf, 1, keepdim=True, dtype=torch.float32)
        self.scale = scale_of(peak, dtype)
        self.values = (self._source / self.scale).to(dtype, memory_format=torch.contiguous_format)

    def transposed(self) -> Rounded:
        """Return the transpose, rounded along its own rows, once."""
        if self._transposed is None:
            self._transposed = type(self)(self._source.t())
            self._transposed._transposed = self
        return self._transposed

    def times(self, other: Rounded, dtype: torch.dtype, is_forward: bool = False) -> Tensor:
        """Compute self @ other^T."""
        if self.values.is_cpu:
            return (self.values.float() @ other.values.float().t() * self.scale * other.scale.t()).to(dtype)
        # The kernel returns bf16 alone.
        return torch._scaled_mm(
            self.values,
            other.values.t(),
            scale_a=self.scale,
            scale_b=other.scale.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=is_forward,
        ).to(dtype)


class _RoundedBlocks(_RoundedRows):
    """A matrix rounded to e4m3, with a scale in e8m0, a power of two, for 32 values of a row: [rows, columns / 32]."""

    def __init__(self, x: Tensor, is_gradient: bool = False) -> None:
        """Round `x`, [rows, columns]; scales are rounded up, so that no value is beyond the end of the range."""
        self._source, self._transposed = x.detach(), None
        dtype = torch.float8_e4m3fn
        blocks = self._source.unflatten(1, (-1, _BLOCK))
        peak = torch.linalg.vector_norm(blocks, torch.inf, 2, dtype=torch.float32)
        bits = (peak / torch.finfo(dtype).max).view(torch.int32)
        exponent = ((bits + 0x7FFFFF) >> 23).clamp(1, 254)  # with its bias of 127, which e8m0 has too
        self.scale = exponent.to(torch.uint8).view(torch.float8_e8m0fnu)
        quotient = blocks / (exponent << 23).view(torch.float32).unsqueeze(2)
        self.values = quotient.flatten(1).to(dtype, memory_format=torch.contiguous_format)

    def times(self, other: Rounded, dtype: torch.dtype, is_forward: bool = False) -> Tensor:
        """Compute self @ other^T."""
        if self.values.is_cpu:
            return (self._whole() @ other._whole().t()).to(dtype)
        return torch._scaled_mm(
            self.values, other.values.t(), swizzled(self.scale), swizzled(other.scale), out_dtype=dtype
        )

    def _whole(self) -> Tensor:
        return (self.values.float().unflatten(1, (-1, _BLOCK)) * self.scale.float().unsqueeze(2)).flatten(1)


def scale_of(peak: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale that maps a largest value, in fp32, to the end of the range; zeros have none to scale by."""
    return (peak / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)


def swizzled(scale: Tensor) -> Tensor:
    """Return scales of blocks, [rows, blocks], in the order of cuBLAS: tiles of 128 rows and 4 blocks, padded.

    In a tile, the scale of row r and block b is at (r % 32) * 16 + r // 32 * 4 + b.
    """
    padded = F.pad(scale.view(torch.uint8), (0, -scale.shape[1] % 4, 0, -len(scale) % 128))
    tiles = padded.view(len(padded) // 128, 4, 32, -1, 4).permute(0, 3, 2, 1, 4)  # [.., .., r % 32, r // 32, b]
    return tiles.flatten().view(scale.dtype)


def _place(x: Tensor) -> tuple[int, int]:
    """Return where the memory of a tensor is; fake tensors of a plan have no address."""
    return x.untyped_storage()._cdata, x.storage_offset()


def _is_whole(weight: Tensor, parameter: Tensor) -> bool:
    """Return whether `weight` is `parameter` itself or its transpose."""
    if weight is parameter:
        return True
    is_matrix = weight.dim() == parameter.dim() == 2
    same_place = is_matrix and _place(weight) == _place(parameter)
    return same_place and weight.shape == parameter.t().shape and weight.stride() == parameter.t().stride()


def _is_same(x: Tensor, known: Tensor, version: int) -> bool:
    """Return whether `x` has the values that `known`, whose memory is still in use, had at `version`."""
    same_place = _place(x) == _place(known) and x.shape == known.shape and x.stride() == known.stride()
    return same_place and x.dtype == known.dtype and x._version == known._version == version


class Float8(Native):
    """Products in FP8, "tensorwise", if all sizes are multiples of 16, else in native torch.

    Attributes:
        kind: how matrices are rounded.
        multiple: what sizes have to be multiples of.
    """

    kind: type[Rounded] = Rounded
    is_native = False
    writes_gradients = False
    gathers_rounded = True
    multiple = 16

    def __init__(self) -> None:
        self.key = str(next(_NUMBERS))
        _KERNELS[self.key] = self
        self._reuses = False  # whether in `reusing_weights`
        # Parameter -> its version, and its rounded values; None where these are not kept.
        self._weights: dict[nn.Parameter, tuple[int, Rounded]] | None = None
        # The same of experts, by the strides of what is multiplied: the weight or its transpose.
        self._experts: dict[tuple[nn.Parameter, tuple[int, ...]], tuple[int, tuple[Tensor, Tensor]]] = {}
        # Whether a gradient -> the last one, or the last activation, its version, and its rounded values.
        self._latest: dict[bool, tuple[Tensor, int, Rounded]] = {}

    @contextmanager
    def reusing_weights(self, keeps_weights: bool = True) -> Iterator[None]:
        """Round each parameter once in this context, in which nothing may write to the memory of parameters.

        The version of a parameter does not tell of all writes: its memory is part of a bucket, which is written as a
        whole. The rounded values take one byte per element until the context ends. The last activation and the last
        gradient are kept, too: layers that read one input share its rounding, and a gradient has two products.

        Args:
            keeps_weights: whether rounded weights are kept; not where ranks gather weights before each use.
        """
        outer = self._reuses, self._weights
        self._reuses = True
        if keeps_weights and self._weights is None:
            self._weights = {}
        try:
            yield
        finally:
            self._reuses, self._weights = outer
            self._latest.clear()
            if self._weights is None:
                self._experts.clear()

    def gathered_later(self, x: Tensor, region: SequenceParallel) -> Tensor:
        """Return a placeholder of whole sequences, which products gather rounded; `x`: [batch, seq/tp, features]."""
        if torch.is_autocast_enabled(x.device.type):  # which casts after a gather
            return region.gather(x)
        return RoundedGather(x, region, self).placeholder()

    def gathered(self, x: Tensor, group: ProcessGroup, length: int, is_gradient: bool = False) -> RoundedTokens:
        """Round this rank's tokens and gather them: [batch, seq/tp, features] -> [batch * seq, features].

        The scale is that of all tokens, as if they were rounded after a gather; torchao's sequence parallelism in
        float8 does the same. Values of padding behind `length` count for nothing.
        """
        share = x.shape[SEQ_DIM]
        own = x.detach()[:, : max(length - dist.get_rank(group) * share, 0)]
        peak = torch.zeros((), device=x.device)
        if own.numel():
            # Not every backend's maximum is nan if a value is; of inf, as of nan, all products are nan.
            peak = torch.linalg.vector_norm(own, torch.inf, dtype=torch.float32).nan_to_num(nan=torch.inf)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        rounded = Rounded(x.flatten(0, 1), is_gradient, peak)
        values = all_gather_dim(rounded.values.view(torch.uint8).view(x.shape), SEQ_DIM, group, length)
        return RoundedTokens(values.flatten(0, 1).view(rounded.values.dtype), rounded.scale, x.dtype)

    def gathered_gradient(self, grad: Tensor, weight: Tensor, group: ProcessGroup, length: int) -> Any:
        """Gather [batch, seq/tp, out] for the products with `weight`, rounded if these are in FP8."""
        if not (self.gathers_rounded and self._fits(grad, *weight.shape)):
            return super().gathered_gradient(grad, weight, group, length)
        return self.gathered(grad, group, length, is_gradient=True)

    def restored(self, values: Tensor, scale: Tensor, dtype: torch.dtype) -> RoundedTokens:
        """Return what `gathered` did, given its tensors; layers that read one input share its transpose."""
        known = self._latest.get(False)
        if known is None or not _is_same(values, *known[:2]):
            known = values, values._version, RoundedTokens(values, scale, dtype)
        if self._reuses:
            self._latest[False] = known
        return known[2]

    def columns(self, layers: Sequence[Any], x: Tensor) -> Sequence[Tensor]:
        """Compute [..., in] -> [..., local out] for column-parallel layers that all read `x`."""
        gather = getattr(x, "pending_gather", None)
        if not isinstance(gather, RoundedGather):
            return super().columns(layers, x)
        if not all(self._fits(gather.whole, *layer.matrix.shape) for layer in layers):
            return super().columns(layers, gather.tokens())
        return [RoundedLinear.apply(gather.whole, gather, layer.matrix, layer.added_bias, layer) for layer in layers]

    def _rounded(self, x: Tensor | RoundedTokens, is_gradient: bool = False) -> Rounded:
        """Return rounded `x`, [rows, columns], an activation or a gradient."""
        if isinstance(x, RoundedTokens):
            return x
        if not self._reuses or x.is_inference():
            return self.kind(x, is_gradient)
        known = self._latest.get(is_gradient)
        if known is None or not _is_same(x, *known[:2]):
            known = self._latest[is_gradient] = (x.detach(), x._version, self.kind(x, is_gradient))
        return known[2]

    def _rounded_weight(self, weight: Tensor) -> Rounded:
        """Return rounded `weight`, [out, in]: a parameter, its transpose, or a tensor that was made for one product."""
        if (rounded := getattr(weight, "rounded", None)) is not None:
            return rounded
        parameter = weight._base if weight._is_view() else weight
        is_transposed = parameter is not weight
        if self._weights is None or not isinstance(parameter, nn.Parameter) or not _is_whole(weight, parameter):
            return self.kind(weight)
        version, known = self._weights.get(parameter, (None, None))
        if version != parameter._version:
            known = self.kind(parameter.detach())
            self._weights[parameter] = parameter._version, known
        return known.transposed() if is_transposed else known

    def saved(self, weight: Tensor) -> Tensor | None:
        """Return what a node saves of a weight: None of one that ranks gather rounded, as `weight.rounded`."""
        return None if hasattr(weight, "rounded") else weight

    def traced(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply in a graph, by one operator."""
        return torch.ops.booster.fp8_linear(x, weight, bias, self.key)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply in FP8: [..., in] -> [..., out]."""
        flat = x if isinstance(x, RoundedTokens) else x.reshape(-1, x.shape[-1])
        if not len(flat):  # reads no weight, which this rank may have to gather
            return x.new_empty(*x.shape[:-1], weight.shape[0])
        if not self._fits(flat, *weight.shape):
            return super().forward(x, weight, bias)
        out = self._rounded(flat).times(self._rounded_weight(weight), x.dtype, is_forward=True)
        out = out if bias is None else out + bias
        return no_view(out.view(*x.shape[:-1], out.shape[-1]))

    def grad_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Compute the input gradient in FP8, [tokens, in]."""
        if not len(grad):
            return grad.new_empty(0, weight.shape[1])
        if not self._fits(grad, *weight.shape):
            return super().grad_input(grad, weight)
        rounded = self._rounded(grad, is_gradient=True)
        return rounded.times(self._rounded_weight(weight).transposed(), grad.dtype)

    def add_grad_input(self, total: Tensor, grad: Tensor, weight: Tensor) -> None:
        """Add the input gradient, computed in FP8, to `total`."""
        total.add_(self.grad_input(grad, weight))

    def grad_weight(self, grad: Tensor, x: Tensor, transposed: bool = False) -> Tensor:
        """Compute the weight gradient in FP8, [out, in] or its transpose."""
        if not self._fits(grad, grad.shape[1], x.shape[1]):
            return super().grad_weight(grad, x, transposed)
        factors = [self._rounded_columns(grad, is_gradient=True), self._rounded_columns(x)]
        first, second = reversed(factors) if transposed else factors
        return first.times(second, grad.dtype)

    def _rounded_columns(self, x: Tensor, is_gradient: bool = False) -> Rounded:
        """Return rounded `x`, [tokens, features], as [features, tokens], with tokens padded: products sum over them."""
        return self._rounded(x, is_gradient).padded(-len(x) % self.multiple).transposed()

    def _fits(self, x: Tensor, *sizes: int) -> bool:
        is_known = x.dtype in (torch.bfloat16, torch.float32)
        return len(x) > 0 and is_known and all(size % self.multiple == 0 for size in sizes)


class Rowwise(Float8):
    """Products in FP8, "rowwise"; weight gradients are native products, which can be written to gradient buffers."""

    kind = _RoundedRows
    writes_gradients = True
    gathers_rounded = False  # products that sum over tokens need these as they are
    grad_weight = Native.grad_weight

    def grouped(self, x: Tensor, weight: Tensor, ends: Tensor, is_forward: bool = False) -> Tensor:
        """Multiply the rows of each expert by its weight: [rows, in] and [experts, in, out] -> [rows, out].

        Args:
            ends: end of the rows of each expert, [experts]; rows behind the last one are any values.
        """
        rows, (values, scale) = _RoundedRows(x), self._rounded_experts(weight)
        if x.is_cpu:
            out = torch.zeros(len(x), weight.shape[2])
            for expert, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
                own = rows.values[start:end].float() @ values[expert].float()
                out[start:end] = own * rows.scale[start:end] * scale[expert]
            return out.to(x.dtype)
        return torch._scaled_grouped_mm(
            rows.values,
            values,
            rows.scale.flatten(),
            scale.flatten(1),
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=is_forward,
        ).to(x.dtype)

    def _rounded_experts(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return [experts, in, out] rounded along `in`, in memory of [experts, out, in], and scales, [experts, 1, out].

        A weight, and its transpose, is rounded once in `reusing_weights`.
        """
        parameter = weight._base if weight._is_view() else weight
        is_kept = self._weights is not None and isinstance(parameter, nn.Parameter)
        place = (parameter, weight.stride()) if is_kept else None
        version, known = self._experts.get(place, (None, None)) if is_kept else (None, None)
        if known is None or version != parameter._version:
            columns = weight.detach().transpose(1, 2)
            peak = torch.linalg.vector_norm(columns, torch.inf, 2, keepdim=True, dtype=torch.float32)
            scale = scale_of(peak, torch.float8_e4m3fn)
            values = (columns / scale).to(torch.float8_e4m3fn, memory_format=torch.contiguous_format)
            known = values.transpose(1, 2), scale.transpose(1, 2)
            if is_kept:
                self._experts[place] = parameter._version, known
        return known


class RowsOfExperts(TorchFunctionMode):
    """Computes grouped products of experts in FP8, "rowwise", where torch or transformers call native ones.

    Args:
        kernel: keeps rounded weights, see `Float8.reusing_weights`.
    """

    def __init__(self, kernel: Rowwise) -> None:
        super().__init__()
        self._kernel = kernel

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Replace the product of [rows, in] and [experts, in, out] by one in FP8, if 16 divides all sizes."""
        kwargs = kwargs or {}
        if func is torch._grouped_mm and args[1].dim() == 3:  # what `F.grouped_mm` calls, too
            x, weight = args
            is_known = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float32)
            if is_known and len(x) and not any(size % Rowwise.multiple for size in weight.shape[1:]):
                return _GroupedLinear.apply(x, weight, kwargs["offs"], self._kernel)
        return func(*args, **kwargs)


class _GroupedLinear(torch.autograd.Function):
    """y = x W_e for the rows of each expert e; weight gradients are native products, as those of `Rowwise`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, kernel: Rowwise) -> Tensor:
        """Compute [rows, in] and [experts, in, out] -> [rows, out]; `ends`: of the rows of each expert."""
        ctx.save_for_backward(x, weight, ends)
        ctx.weight, ctx.kernel = weight, kernel
        return kernel.grouped(x, weight, ends, is_forward=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of rows, in FP8, and of weights."""
        (x, weight, ends), needs, grad = ctx.saved_tensors, ctx.needs_input_grad, grad.contiguous()
        grad_x = ctx.kernel.grouped(grad, ctx.weight.transpose(1, 2), ends) if needs[0] else None
        if not needs[1]:
            return grad_x, None, None, None
        if weight.is_contiguous():
            return grad_x, torch._grouped_mm(x.t(), grad, offs=ends), None, None
        return grad_x, torch._grouped_mm(grad.t(), x, offs=ends).transpose(1, 2), None, None


class Mx(Float8):
    """Products in FP8, "mxfp8", if all sizes are multiples of 32, else in native torch."""

    kind = _RoundedBlocks
    gathers_rounded = False  # products that sum over tokens round them along another dim
    multiple = _BLOCK

    def _rounded_columns(self, x: Tensor, is_gradient: bool = False) -> Rounded:
        return self.kind(F.pad(x, (0, 0, 0, -len(x) % _BLOCK)).t())


_KERNELS: WeakValueDictionary[str, Float8] = WeakValueDictionary()  # by the names that operators of graphs have


def _for_one_call(key: str) -> Float8:
    """Return a kernel with the same rounded weights that knows no inputs: graphs write new ones to their memory."""
    kernel = copy(_KERNELS[key])
    kernel._latest = {}
    return kernel


@defines_operators
def define_products() -> None:
    """Define the operators of products in graphs, whose rounding torch does not see."""
    operator = partial(torch.library.custom_op, mutates_args=())

    @operator("booster::fp8_linear")
    def product(x: Tensor, weight: Tensor, bias: Tensor | None, key: str) -> Tensor:
        return _for_one_call(key).forward(x, weight, bias)

    @operator("booster::fp8_linear_backward")
    def gradients(grad: Tensor, x: Tensor, weight: Tensor, of_x: bool, of_w: bool, key: str) -> tuple[Tensor, Tensor]:
        kernel, flat = _for_one_call(key), matrix(grad).contiguous()
        grad_x = kernel.grad_input(flat, weight).view(x.shape) if of_x else x.new_empty(0)
        return grad_x, kernel.grad_weight(flat, matrix(x)) if of_w else x.new_empty(0)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.key = inputs
        ctx.save_for_backward(x, weight)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        found = torch.ops.booster.fp8_linear_backward(grad, *ctx.saved_tensors, *needs[:2], ctx.key)
        found = (*found, matrix(grad).sum(0) if needs[2] else None)
        return *(each if need else None for each, need in zip(found, needs, strict=False)), None

    def shapes(grad: Tensor, x: Tensor, weight: Tensor, of_x: bool, of_w: bool, key: str) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape if of_x else 0), x.new_empty(weight.shape if of_w else 0)

    product.register_fake(lambda x, weight, bias, key: x.new_empty((*x.shape[:-1], len(weight))))
    gradients.register_fake(shapes)
    product.register_autograd(backward, setup_context=keep)


FP8_RECIPES = {"tensorwise": Float8, "rowwise": Rowwise, "mxfp8": Mx}
