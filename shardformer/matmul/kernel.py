"""LinearKernel: how a linear layer keeps its weight, cuts it over ranks, and multiplies by it; and weight gradients.

Each linear layer has a kernel (`MatmulLayer.kernel`); `KERNELS` in `layers/linear.py` lists those that a native layer
calls for, and the option `precision="fp8"` replaces the native one. A kernel says where a weight may be cut and makes
the shard; the column- and row-parallel layers bring the collectives.

The backward pass does not depend on weight gradients of linear layers, so zero-bubble pipelines (Qi et al., arXiv
2401.10241) first compute and send the gradients of activations, and compute weight gradients in the pipeline bubbles.
If gradients are collected in one buffer, a product or lookup can write, or add, there directly, which saves a copy.

A planner runs layers on fake tensors of the host; they then take the kernels of the device that it plans for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardformer.shard_spec import ShardSpec
from shardformer.utils.untraced import untraced


class _Plan:
    """The plan that runs in this process; global, as passes run one at a time."""

    device_type: str | None = None
    decisions: dict[tuple[int, ...], bool] | None = None


@contextmanager
def planned_for(device_type: str) -> Iterator[None]:
    """Run fake tensors as if on `device_type`; heads of one shape follow the first one's decision."""
    _Plan.device_type, _Plan.decisions = device_type, {}
    try:
        yield
    finally:
        _Plan.device_type = _Plan.decisions = None


def decided(shape: tuple[int, ...], decision: bool) -> bool:
    """Return the decision for a head whose weight has this shape; within a plan, the first decision for that shape."""
    return decision if _Plan.decisions is None else _Plan.decisions.setdefault(shape, decision)


def runs_on(device: torch.device) -> str:
    """Return the type of the device whose kernels compute with tensors on `device`."""
    return _Plan.device_type or device.type


class LinearKernel(ABC):
    """One way to compute y = x W^T + b with a shard of a weight."""

    @abstractmethod
    def accepts(self, native: nn.Module, group: ProcessGroup) -> bool:
        """Return whether shards of this native layer on `group` have this kernel."""

    @abstractmethod
    def shape(self, native: nn.Module) -> tuple[int, int]:
        """Return (out, in) of the weight of a layer."""

    def cuts_inputs(self, native: nn.Module, features: ShardSpec) -> bool:
        """Return whether partial products of a weight cut between inputs, `features` of one dim, sum up."""
        return True

    @abstractmethod
    def cut(self, native: nn.Module, features: ShardSpec, dim: int) -> nn.Parameter:
        """Return this rank's shard of a weight, with its `ShardSpec`; `features`: of outputs (dim 0) or inputs (1)."""

    def prepare(self, layer: Any, native: nn.Module) -> None:  # noqa: B027 (most kernels need nothing more)
        """Give a sharded layer, which has its weight already, what `multiply` needs besides."""

    @abstractmethod
    def multiply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + b: [..., local in] -> [..., local out], without communication."""

    def columns(self, layers: Sequence[Any], x: Tensor) -> Sequence[Tensor]:
        """Compute [..., in] -> [..., local out] for column-parallel layers, with any kernels, that all read `x`."""
        x = layers[0].copied(x)
        return [layer.kernel.multiply(layer, x, layer.added_bias) for layer in layers]

    def rows(self, layer: Any, x: Tensor) -> Tensor:
        """Compute the sum over ranks of x W^T for a row-parallel layer."""
        return layer.summed(self.multiply(layer, layer.own_features(x), None))


class Products:
    """The three products of y = x W^T + b in native torch, for autograd nodes; weights are [out, in].

    Attributes:
        is_native: whether autograd's own products are the same.
        writes_gradients: whether it has `write_grad_weight`.
    """

    is_native = True
    writes_gradients = True

    def saved(self, weight: Tensor) -> Tensor | None:
        """Return what a node saves of a weight; None if products read another form of it."""
        return weight

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute [..., in] -> [..., out]."""
        out = F.linear(x, weight, bias)
        return no_view(out) if out._is_view() else out

    def traced(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute [..., in] -> [..., out] in a graph, with gradients."""
        return F.linear(x, weight, bias)

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
        if place.dtype == first.dtype:
            place.addmm_(first, second, beta=int(adds))
        else:  # on a GPU: products of 16 bit are sums in fp32
            torch.addmm(place, first, second, beta=int(adds), out_dtype=place.dtype, out=place)


def no_view(x: Tensor) -> Tensor:
    """Return `x`, in the same memory, as a tensor that is not a view: allows in-place operators on a node's output."""
    return torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast tensors of one device as autocast casts its operators' inputs, in the graph; never fp64."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(each.to(dtype) if each is not None and _is_eligible(each) else each for each in tensors)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast on a device; None if it is disabled."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _is_eligible(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


_NATIVE = Products()
# (parameter, function that computes its gradient, or writes it to its buffer and returns None)
DeferredWeightGrads = list[tuple[nn.Parameter, Callable[[], Tensor | None]]]
# Elements of a weight from which the 4 bytes an element that a GPU saves by writing to a buffer outweigh the 12 µs that
# a node of our own takes the host longer than torch's.
_WORTH_A_NODE = 10 * 2**20
# Called just before the product, with the product's dtype. Returns memory in the parameter's shape and whether to add
# to its contents; or None. The provider then finds that memory in `parameter.grad`, unless autograd had to accumulate
# gradients from other uses of the parameter. On a GPU products of 16 bit may go to memory of fp32. Autograd would round
# them, so it gets None.
GradBuffer = Callable[[torch.dtype], tuple[Tensor, bool] | None]


class WeightGradStore:
    """Says which passes through one model may split their backward, and collects the weight gradients of first halves.

    Attributes:
        splits: whether such a pass runs.
        deferred: the list that the first half of a backward pass appends to; None outside of a first half.
    """

    def __init__(self) -> None:
        self.splits = False
        self.deferred: DeferredWeightGrads | None = None

    @contextmanager
    def split_backward(self, deferred: DeferredWeightGrads | None = None) -> Iterator[None]:
        """Run a forward pass whose backward, given a list, may run its first half, which appends the rest."""
        before = self.splits, self.deferred
        self.splits, self.deferred = True, deferred
        try:
            yield
        finally:
            self.splits, self.deferred = before


def run_deferred(deferred: DeferredWeightGrads) -> None:
    """Run the second half: compute the deferred gradients and accumulate them in the parameters, hooks included."""
    for parameter, compute in deferred:
        with torch.no_grad():
            gradient = compute()
        if gradient is not None:
            torch.autograd.backward(parameter, gradient)
    deferred.clear()


class LateGradients:
    """Gradients of stacked weights that a backward pass computes once it gets to where the forward pass called `mark`.

    Autograd runs the latest node that is ready: the mark's come after those of what was called behind it.
    """

    def __init__(self) -> None:
        self._marks: dict[str, tuple[Tensor, list[Callable[[], Tensor]]]] = {}

    def mark(self, weights: Mapping[str, Tensor | None]) -> None:
        """Mark the place for those of `weights`, by name, that are stacked, [experts, ...], and trained."""
        self._marks.clear()
        for name, weight in weights.items() if torch.is_grad_enabled() else ():
            if weight is not None and weight.dim() == 3 and weight.requires_grad:
                left: list[Callable[[], Tensor]] = []
                self._marks[name] = _Late.apply(weight, left), left

    def has(self, name: str) -> bool:
        """Return whether the gradient of a weight is for its mark."""
        return name in self._marks

    def leave(self, name: str, out: Tensor, x: Tensor, ends: Tensor, is_transposed: bool) -> Tensor:
        """Leave a weight's gradient for its mark; return the product, [rows, out], for further use.

        Args:
            out: grouped product with the detached weight, [experts, out, in], or [experts, in, out] if `is_transposed`.
            x: [rows, in].
            ends: end of the rows of each expert, [experts].
        """
        token, left = self._marks.pop(name)
        return _Leave.apply(out, token, x, ends, is_transposed, left)


class _Late(torch.autograd.Function):
    """Stands for a weight, without values."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, left: list[Callable[[], Tensor]]) -> Tensor:
        ctx.left = left
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.left.pop()(), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, token: Tensor, x: Tensor, ends: Tensor, is_transposed: bool, left: list
    ) -> Tensor:
        ctx.save_for_backward(x, ends)
        ctx.is_transposed, ctx.left = is_transposed, left
        return no_view(out.view_as(out))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, ends), grad = ctx.saved_tensors, grad.contiguous()
        first, second = (x, grad) if ctx.is_transposed else (grad, x)
        ctx.left.append(partial(torch._grouped_mm, first.t(), second, offs=ends))
        return grad, grad.new_empty(0), None, None, None, None


def weight_gradient(
    weight: Tensor, flat_grad: Tensor, flat_x: Tensor, backend: Products, store: WeightGradStore | None
) -> Tensor | None:
    """Compute the gradient of `weight` in y = x W^T; in the first half of a split backward, defer it and return None.

    It is None also where autograd need not know of it; see `GradBuffer`.

    Args:
        weight: [out, in]; a parameter, or the transpose of one.
        flat_grad: gradient of the output, [tokens, out].
        flat_x: the input, [tokens, in].
        backend, store: those of the layer.
    """
    parameter = weight if weight.is_leaf else _transposed(weight)
    if parameter is None:
        return backend.grad_weight(flat_grad, flat_x)
    is_transposed = parameter is not weight
    if store is not None and store.deferred is not None:
        compute = partial(_compute, parameter, flat_grad, flat_x, is_transposed, backend)
        store.deferred.append((parameter, compute))
        return None
    gradient = _compute(parameter, flat_grad, flat_x, is_transposed, backend)
    return gradient.t() if is_transposed and gradient is not None else gradient


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Look up the rows `ids` of `weight`, [rows, hidden]: [..., hidden]; row `padding_idx` gets no gradient."""
    is_own = weight.is_leaf and not weight.is_cuda and not torch.compiler.is_compiling()
    has_own = is_own and has_grad_buffer(weight)
    return _Lookup.apply(ids, weight, padding_idx) if has_own else F.embedding(ids, weight, padding_idx)


def has_grad_buffer(parameter: Tensor | None) -> bool:
    """Return whether a gradient buffer is attached to the parameter, for which a node of ours replaces one of torch."""
    return hasattr(parameter, "grad_buffer") and (not parameter.is_cuda or parameter.numel() >= _WORTH_A_NODE)


def attach_grad_buffer(parameter: nn.Parameter, place: GradBuffer) -> None:
    """Let the product that computes this parameter's gradient ask `place` where to write it."""
    parameter.grad_buffer = place


def _compute(
    parameter: Tensor, flat_grad: Tensor, flat_x: Tensor, is_transposed: bool, backend: Products
) -> Tensor | None:
    """Compute the gradient of a parameter, in its shape; None if autograd need not know of it."""
    offered = getattr(parameter, "grad_buffer", None)
    fits = offered is not None and backend.writes_gradients and flat_grad.dtype == flat_x.dtype
    place = offered(flat_grad.dtype) if fits else None
    if place is None:
        return backend.grad_weight(flat_grad, flat_x, is_transposed)
    memory, adds = place
    backend.write_grad_weight(memory, adds, flat_grad, flat_x, is_transposed)
    return None if memory.is_cuda else memory


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    backend: Products = _NATIVE,
    store: WeightGradStore | None = None,
) -> Tensor:
    """Compute x W^T + b: [..., in] -> [..., out]."""
    x, weight, bias = autocast(x, weight, bias)
    splits = store is not None and store.splits
    if torch.compiler.is_compiling():  # gradients of graphs reach their buffers like those of other operators
        return _untraced_linear(x, weight, bias, backend, store) if splits else backend.traced(x, weight, bias)
    if splits or not backend.is_native or has_grad_buffer(weight if weight.is_leaf else weight._base):
        pending = getattr(x, "pending_gather", None)  # a placeholder, whose gradient autograd would not follow
        return _Linear.apply(x if pending is None else pending.tokens(), weight, bias, backend, store)
    return F.linear(x, weight, bias)


def matrix(x: Tensor) -> Tensor:
    """Flatten [..., features] -> [tokens, features], also if this rank's shard has no features."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def _transposed(weight: Tensor) -> Tensor | None:
    """Return the parameter that `weight` is the transpose of; None if it is anything else."""
    base = weight._base
    if base is None or not base.is_leaf or weight.dim() != 2 or weight.shape != base.t().shape:
        return None
    same = weight.stride() == base.t().stride() and weight.storage_offset() == base.storage_offset()
    return base if same else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, backend: Products, store: WeightGradStore | None
    ) -> Tensor:
        ctx.save_for_backward(x, backend.saved(weight))
        ctx.weight = weight  # a saved tensor does not record whose transpose it is
        ctx.backend, ctx.store = backend, store
        return backend.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
        flat = matrix(grad)
        # The backend knows the parameter itself; recomputation saves another tensor of its values.
        used = weight if ctx.backend.is_native else ctx.weight
        grad_x = ctx.backend.grad_input(flat, used).view_as(x) if needs[0] else None
        grad_weight = None
        if needs[1] and torch.is_grad_enabled():  # double backward: native products are differentiable
            grad_weight = ctx.backend.grad_weight(flat, matrix(x))
        elif needs[1]:
            grad_weight = weight_gradient(ctx.weight, flat, matrix(x), ctx.backend, ctx.store)
        return grad_x, grad_weight, flat.sum(0) if needs[2] else None, None, None


_untraced_linear = untraced(_Linear.apply)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding_idx = weight, padding_idx
        return no_view(F.embedding(ids, weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        place = None if torch.is_grad_enabled() else weight.grad_buffer(grad.dtype)
        if place is None:
            no_row = -1 if ctx.padding_idx is None else ctx.padding_idx
            return None, torch.ops.aten.embedding_dense_backward(grad, ids, len(weight), no_row, False), None
        memory, adds = place
        if not adds:
            memory.zero_()
        rows, flat = ids.reshape(-1), matrix(grad)  # [tokens], [tokens, hidden]
        if ctx.padding_idx is not None:
            flat = flat.masked_fill((rows == ctx.padding_idx).unsqueeze(-1), 0.0)
        memory.index_add_(0, rows, flat)
        return None, memory, None
