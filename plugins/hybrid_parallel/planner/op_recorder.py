"""Record the operators of a forward and a backward pass by running them on fake tensors.

Nothing is computed or allocated, so a layer of any size is recorded in milliseconds, with the operators, the saved
tensors and the collectives of the actual sharded model.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.planner.device import PRESETS
from shardformer.cross_entropy.fused_linear import finds_gradients
from shardformer.peft import model_inside
from shardformer.utils.untraced import is_saved

# Part of a model: ("layer", list, kind), or ("gap", list) for what runs before that list; the last gap is the head.
Part = tuple


class TooManyOperators(ConfigurationError):
    """A pass has more than `MOST_OPERATORS` operators, for a model that processes tokens one by one."""


@dataclass(frozen=True)
class Operator:
    """Recorded operator: a matmul, attention, or a memory-bound operator."""

    kind: str  # "matmul", "attention" or "memory"
    flops: float  # multiplications and additions; 0 for memory-bound operators
    bytes: float  # bytes read and written
    early: bool = False  # whether it computes gradients during the forward pass
    is_causal: bool = False  # whether it is attention that skips the pairs above the diagonal
    is_saved: bool = False  # whether recomputation by operators saves its results
    is_8_bit: bool = False  # whether it is a product in FP8
    of_experts: float = 0.0  # bytes of stacked weights of experts, of which a rank under expert parallelism has a share


@dataclass
class PassRecord:
    """Recorded pass of a part, in one direction."""

    operators: list[Operator] = field(default_factory=list)
    collectives: list[tuple[str, float]] = field(default_factory=list)  # pairs (kind, bytes of the whole buffer)
    # peak bytes above those alive at the start (for a forward pass: at the start or the end, the larger one)
    peak: float = 0.0


@dataclass
class PartRecord:
    """Recorded part of a model."""

    forward: PassRecord = field(default_factory=PassRecord)
    backward: PassRecord = field(default_factory=PassRecord)
    saved: float = 0.0  # bytes that its forward pass saves for the backward pass
    results: float = 0.0  # bytes of the results that recomputation by operators saves
    # bytes of the inputs of its products with weights, and of the gradients of their outputs, which the first half of a
    # split backward pass leaves to the second
    deferred: float = 0.0
    output: float = 0.0  # bytes of the hidden state that it returns
    routed: float = 0.0  # bytes of the tokens of all choices of experts
    rounded: float = 0.0  # bytes of its weights in FP8, which stay for a step


# Limit for a forward and a backward pass together; a model that processes tokens one by one would take hours.
MOST_OPERATORS = 50_000
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}
_MATMULS = ("_scaled_mm", "mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "varlen_attn")
_MOVES_NOTHING = ("empty", "_unsafe_view", "detach", "alias", "lift_fresh", "record_stream", "set_", "resize_")


class Recorder(TorchDispatchMode):
    """Dispatch mode that records operators, grouped by the part that runs.

    Args:
        parameters: tensors whose storage does not count as activations.
        is_limited: whether it raises `TooManyOperators`.
    """

    def __init__(self, parameters: list[Tensor], is_limited: bool = True) -> None:
        super().__init__()
        self.is_limited = is_limited
        self.parts: dict[Part, PartRecord] = {}
        self.part: Part = ("gap", 0)
        self.backwards = False
        self.num_operators = 0
        self._own = {_key(param) for param in parameters}
        self._saved: dict[int, Tensor] = {}
        self._deferred: set[int] = set()
        self._alive: dict[int, int] = {}
        self._alive_bytes = self._base = self._peak = 0

    def enter(self, part: Part) -> None:
        """Switch to `part`."""
        self._leave()
        self.part = part
        self._base = self._peak = self._alive_bytes

    def turn(self) -> None:
        """Start the backward pass."""
        self._leave()
        self.backwards = True
        self._base = self._peak = self._alive_bytes

    def give(self, hidden: Tensor) -> None:
        """Record the size of the hidden state that the running part returns."""
        self._record.output = float(hidden.numel() * hidden.element_size())

    def route(self, _: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> None:
        """Record the size of the tokens that experts are about to get: [tokens, hidden], for k choices each."""
        hidden, index = args[:2]
        if not self.backwards:
            self._record.routed += float(index.numel() * hidden.shape[-1] * hidden.element_size())

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Record the tensors that autograd saves for the backward pass."""
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name
        if name.startswith("prim"):  # a query such as `tensor.device`: C++ ends the process if it raises
            return _run(func, name, args, kwargs or {})
        self.num_operators += 1
        if self.is_limited and self.num_operators > MOST_OPERATORS:
            raise TooManyOperators(f"a pass has more than {MOST_OPERATORS:,} operators")
        if name == "aten::_local_scalar_dense":  # `item()`: fake tensors have no values
            return 0.0 if args[0].dtype.is_floating_point else 0
        result = _run(func, name, args, kwargs or {})
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in outputs:
            self._watch(tensor)
        if name.startswith(("c10d::", "_c10d_functional::")):
            self._communicate(name.partition("::")[2], inputs)
        elif not func.is_view and not any(word in name.partition("::")[2] for word in _MOVES_NOTHING):
            operator = count_operator(func, args, kwargs or {}, inputs, outputs, result)
            if not self.backwards and is_saved(func, *args, **(kwargs or {})):
                operator = replace(operator, is_saved=True)
                self._record.results += sum(map(_bytes, outputs))
            self._pass.operators.append(operator)
            if name == "booster::round_to_fp8" and _key(args[0]) in self._own:
                self._record.rounded += sum(map(_bytes, outputs))
            if operator.kind == "matmul" and not operator.early and not self.backwards:
                self._defer(inputs, outputs)
        return result

    def _defer(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Record what a product with a weight leaves for its weight gradient."""
        others = {_key(tensor): tensor for tensor in inputs if _key(tensor) not in self._own}
        if len(others) == len({_key(tensor) for tensor in inputs}):
            return  # of two activations
        for key in others.keys() - self._deferred:  # several products share an input
            self._deferred.add(key)
            self._record.deferred += _bytes(others[key])
        self._record.deferred += sum(map(_bytes, outputs))

    @property
    def _record(self) -> PartRecord:
        return self.parts.setdefault(self.part, PartRecord())

    @property
    def _pass(self) -> PassRecord:
        return self._record.backward if self.backwards else self._record.forward

    def _leave(self) -> None:
        # Memory that stays alive after a forward pass is already counted in `saved`.
        stays = self._base if self.backwards else max(self._base, self._alive_bytes)
        self._pass.peak = max(self._pass.peak, self._peak - stays)

    def _communicate(self, name: str, inputs: list[Tensor]) -> None:
        kind = next((kind for start, kind in _COLLECTIVES.items() if name.strip("_").startswith(start)), None)
        if kind is not None:
            size = max(tensor.numel() * tensor.element_size() for tensor in inputs)
            self._pass.collectives.append((kind, float(size)))
            if kind == "reduce_scatter" and not self.backwards:  # of a product, of which this rank saves its part
                self._record.results += min(map(_bytes, inputs)) - size

    def _save(self, tensor: Tensor) -> Tensor:
        key = _key(tensor)
        if key not in self._own and key not in self._saved:
            self._saved[key] = tensor  # kept alive, so that its storage ID is not reused
            self._record.saved += tensor.untyped_storage().nbytes()
        return tensor

    def _watch(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._alive or key in self._own:
            return
        self._alive[key] = storage.nbytes()
        self._alive_bytes += storage.nbytes()
        self._peak = max(self._peak, self._alive_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._alive_bytes -= self._alive.pop(key, 0)


def _run(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    if name != "aten::_grouped_mm" or args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    # On fake tensors, torch can infer the shape of this operator only in bf16.
    cast = [each.bfloat16() if isinstance(each, Tensor) and each.is_floating_point() else each for each in args]
    return func(*cast, **kwargs).to(args[0].dtype)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def count_operator(
    func: Any, args: tuple, kwargs: dict, inputs: list[Tensor], outputs: list[Tensor], result: Any
) -> Operator:
    """Return FLOPs and bytes of an operator that has run; `inputs`, `outputs`: its tensors."""
    name = func._schema.name.partition("::")[2]
    size = float(sum(map(_bytes, inputs)) + sum(map(_bytes, outputs)))
    if any(each in name for each in _ATTENTION):
        is_causal = any(value is True or value == [-1, 0] for value in args if not isinstance(value, Tensor))
        keys_before = kwargs.get("window_size_left")
        window = None if keys_before in (None, -1) else keys_before + 1
        return Operator("attention", _attention_flops(name, is_causal, inputs, window), size, is_causal=is_causal)
    if name == "_grouped_mm":
        stacked = float(sum(_bytes(each) for each in (*inputs, *outputs) if each.dim() == 3))
        return Operator("matmul", 2.0 * inputs[0].numel() * inputs[1].shape[-1], size, of_experts=stacked)
    if name.rstrip("_") in _MATMULS:
        count = flop_registry.get(func._overloadpacket) or flop_registry[getattr(torch.ops.aten, name.rstrip("_"))]
        args = tuple(each for each in args if not isinstance(each, torch.dtype))  # which these functions do not take
        flops, is_8_bit = float(count(*args, **kwargs, out_val=result)), inputs[0].itemsize == 1
        return Operator("matmul", flops, size, finds_gradients(), is_8_bit=is_8_bit)
    if name == "embedding":  # reads as many rows as it writes
        size = 2.0 * _bytes(outputs[0])
    elif name == "round_to_fp8":  # looks for the largest value first
        size += _bytes(inputs[0])
    return Operator("memory", 0.0, size)


def _attention_flops(name: str, is_causal: bool, inputs: list[Tensor], window: int | None = None) -> float:
    """Count the FLOPs of two matmuls (five in the backward pass), halved if the operator is marked as causal.

    Of packed documents, [tokens, heads, head_dim], as if all were equally long: their borders are values. `window`: the
    most keys that a query sees.
    """
    backward = "backward" in name
    query, key, value = inputs[1:4] if backward else inputs[:3]
    width = (query.shape[-1] + value.shape[-1]) / 2
    if query.dim() == 3:
        length, heads = query.shape[:2]
        keys = len(key) / (len(next(each for each in inputs if each.dim() == 1)) - 1)
        flops = 4.0 * heads * length * (keys if window is None else min(keys, window)) * width
    else:
        *batch_and_heads, length, _ = query.shape
        flops = 4.0 * math.prod(batch_and_heads) * length * key.shape[-2] * width
    return flops * (2.5 if backward else 1.0) * (0.5 if is_causal else 1.0)


def _bytes(tensor: Tensor) -> int:
    """Return the bytes read or written of a tensor; an expanded tensor has less storage than its shape implies."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


Shapes = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
_MOST_SHAPES = 8  # batches of other lengths are interpolated between those that were counted


class ModelFlops:
    """Counts matrix products and attention of one sample, without weights or values (fake tensors)."""

    def __init__(self, model: HybridParallelModel) -> None:
        self.model_class, self.config = type(model_inside(model.unwrap())), model.origin.config
        self._counted: dict[Shapes, float | None] = {}

    def of(self, batch: Mapping[str, Any]) -> float | None:
        """Return the FLOPs of a forward pass of `batch`; None if the model cannot be looked at."""
        tensors = {name: each for name, each in batch.items() if isinstance(each, Tensor) and each.dim()}
        rows = max((len(each) for each in tensors.values()), default=0)
        shapes = tuple((name, tuple(each.shape[1:]), each.dtype) for name, each in sorted(tensors.items()))
        if self.config is None or not rows:
            return None
        if shapes not in self._counted and len(self._counted) < _MOST_SHAPES:
            self._counted[shapes] = self._count(shapes)
        a_sample = self._counted[shapes] if shapes in self._counted else self._interpolated(shapes)
        return None if a_sample is None else a_sample * rows

    def _count(self, shapes: Shapes) -> float | None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        counter = FlopCounter()
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                model = self.model_class(self.config)
                batch = {name: torch.zeros(1, *shape, dtype=dtype) for name, shape, dtype in shapes}
                with counter:
                    model(**batch)
        except Exception:  # a model may read values, which fake tensors do not have
            return None
        return counter.flops

    def _interpolated(self, shapes: Shapes) -> float | None:
        """Return the FLOPs between two lengths that were counted; attention makes them a little more than linear."""
        length = _length(shapes)
        known = sorted((_length(each), flops) for each, flops in self._counted.items() if flops)
        if not known:
            return None
        below = max((each for each in known if each[0] <= length), default=known[0])
        above = min((each for each in known if each[0] >= length), default=known[-1])
        if below[0] == above[0]:
            return below[1] * length / max(below[0], 1)
        share = (length - below[0]) / (above[0] - below[0])
        return below[1] + share * (above[1] - below[1])


class FlopCounter(TorchDispatchMode):
    """Dispatch mode that adds up the FLOPs of operators, in `flops`."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if inputs and outputs and not func.is_view:
            self.flops += count_operator(func, args, kwargs or {}, inputs, outputs, result).flops
        return result


def peak_flops(precision: str) -> float | None:
    """Return the FLOP/s that this rank's device promises by its vendor's specification; None for an unknown device."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name().lower()
    found = next((device for known, device in PRESETS.items() if known.lower() in name), None)
    return None if found is None else found.peak(precision)


def _length(shapes: Shapes) -> int:
    return max((shape[0] for _, shape, _ in shapes if shape), default=1)
