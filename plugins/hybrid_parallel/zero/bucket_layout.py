"""Memory of a bucket: what it is allocated from, offsets and gradients of its parameters, and the shard of each rank.

`OptimizerShard` is the shard as the optimizer updates it: the parameters' own memory or, of parameters in 16 bit, an
fp32 copy: the master weights (Micikevicius et al., arXiv 1710.03740). The optimizer sees pieces of parameters.
Everything else works on the whole tensor: on a GPU, a step then starts a few kernels for each bucket instead of for
each parameter.

`BucketParameter.grad` reads the gradient from the bucket. torch's own tools (`clip_grad_norm_`, `clip_grad_value_`,
loops over `param.grad`) take None for "no gradient" and continue silently. If this rank has the whole gradient,
`param.grad` returns it, to read and to write in place. Otherwise it raises an error that names the equivalent for all
ranks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from booster.errors import ConfigurationError
from shardformer.shard_spec import pad_to_multiple, parameter_like

if TYPE_CHECKING:
    from plugins.hybrid_parallel.zero.bucket import Bucket
    from plugins.hybrid_parallel.zero.collectives.backend import ZeroCollectives
    from plugins.hybrid_parallel.zero.stage3 import ShardedParameters


class StateMemory:
    """Memory of the device: nothing is offloaded.

    Attributes:
        is_offloaded: whether tensors are anywhere else. The optimizer then steps one bucket at a time.
    """

    is_offloaded = False

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized memory of shape [count] for values of a rank on `device`."""
        return torch.empty(count, dtype=dtype, device=device)

    def release(self, tensor: Tensor) -> None:
        """Release memory from `empty` that is not used any more."""

    def read_ahead(self, tensor: Tensor) -> None:
        """Start to bring values from `empty` near, because they are used soon."""

    def page_out(self, tensor: Tensor) -> None:
        """Let values from `empty` go until they are used again; other tensors stay as they are."""


class Storage:
    """Where optimizer states and shards of parameters are: on their device."""

    def of_states(self, optim: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> StateMemory:
        """Return the memory for the states of an optimizer of these parameters; all ranks must call this."""
        return StateMemory()

    def of_shards(self, params: Sequence[nn.Parameter]) -> StateMemory | None:
        """Return the memory of shards of parameters, None for the device's; all ranks must call this."""
        return None


class FreshBuffers:
    """The interface of a pool for buffers that are not reused."""

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized buffer of shape [size]."""
        return torch.empty(size, dtype=dtype, device=device)

    def give(self, flat: Tensor) -> None:
        """Give up a buffer from `take`."""

    leave = give


class GradBufferPool:
    """Pool of gradient buffers: buckets that are already reduced pass their memory on to later buckets.

    On a CPU, fresh memory costs as much time as a copy, because the system fills its pages with zeros. On a GPU, the
    pool is not used: torch has its own cache.

    Args:
        memory: what allocates buffers: the collectives that they are used with, or a `StateMemory`.
        unit: minimum size of a buffer in bytes, so that buckets of about one size can share buffers.
    """

    def __init__(self, memory: ZeroCollectives | StateMemory, unit: int = 0) -> None:
        self._memory, self._unit = memory, unit
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}  # address -> the whole buffer

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Take an uninitialized buffer of shape [size]."""
        if device.type != "cpu":
            return self._memory.empty(size, dtype, device)
        fits = [buffer for buffer in self._free if buffer.dtype == dtype and buffer.numel() >= size]
        if fits:
            whole = min(fits, key=Tensor.numel)
            self._free = [buffer for buffer in self._free if buffer is not whole]
        else:
            whole = self._memory.empty(max(size, self._unit // dtype.itemsize), dtype, device)
        self._taken[whole.data_ptr()] = whole
        return whole[:size]

    def give(self, flat: Tensor) -> None:
        """Put a buffer from `take` back into the pool."""
        if flat.device.type == "cpu":
            self._free.append(self._taken.pop(flat.data_ptr()))

    def leave(self, flat: Tensor) -> None:
        """Give up a buffer from `take` that other code still reads."""
        self._taken.pop(flat.data_ptr(), None)

    def trim(self, count: int) -> None:
        """Release all free buffers except the largest `count`."""
        self._free.sort(key=Tensor.numel, reverse=True)
        for buffer in self._free[count:]:
            self._memory.release(buffer)
        del self._free[count:]


# Parameters and shards start at multiples of this many elements: kernels are slower on data that starts in the middle
# of a cache line (docs/levers.md).
_ALIGNMENT = 16


@dataclass(frozen=True)
class BucketOptions:
    """Options that the buckets of one optimizer share."""

    dp_group: ProcessGroup  # the ranks that hold the same shards of these parameters and see other tokens
    shard_group: ProcessGroup  # the ranks among them that share the states: all of them, unless `zero_size` is smaller
    # the ranks that hold the same shard of the states; None if this rank is the only one
    copy_group: ProcessGroup | None
    zero_stage: int  # 0 to 3
    master_weights: bool  # whether 16-bit parameters get fp32 copies for the optimizer
    whole_parameters: bool  # whether the optimizer needs whole parameters (Adafactor, Muon)
    bucket_bytes: int  # upper limit of a bucket's gradients, in bytes
    exchange: ZeroCollectives  # the collectives that move shards of gradients and parameters between ranks
    grad_buffers: GradBufferPool  # the pool from which the buckets take buffers of gradients that they shard
    # whether local gradients are kept until the step is known to be finite, for reports on nan and inf. Where ranks
    # learn that before, as between CPUs, only those of a bad step are kept; elsewhere none are kept under ZeRO stages 2
    # and 3.
    keeps_local: bool = True
    # the options under which no rank has whole gradients as in plain torch; None if every rank has them
    hidden_by: str | None = None
    # memory of master weights, reduced gradients and optimizer states
    states: StateMemory = field(default_factory=StateMemory)

    @property
    def num_shards(self) -> int:
        """Number of shards that a bucket is divided into: 1 under ZeRO stage 0."""
        return dist.get_world_size(self.shard_group) if self.zero_stage else 1

    @property
    def shards_parameters(self) -> bool:
        """Whether ranks keep only a shard of the parameters, or a single rank keeps them in a file (ZeRO stage 3)."""
        return self.num_shards > 1 or (self.zero_stage == 3 and self.exchange.shard_memory is not None)

    @property
    def reduces_each_pass(self) -> bool:
        """Whether the gradients of every pass are reduced by themselves (ZeRO stage 2)."""
        return self.zero_stage >= 2 and self.num_shards > 1

    @property
    def counts(self) -> bool:
        """Whether the global norm counts this rank's gradients; only one of several copies is counted."""
        copies = self.copy_group if self.zero_stage else self.dp_group
        return copies is None or dist.get_rank(copies) == 0

    @property
    def shard_index(self) -> int:
        """Index of this rank's shard: 0 under ZeRO stage 0."""
        return dist.get_rank(self.shard_group) if self.zero_stage else 0


@dataclass(frozen=True, eq=False)
class BucketSlice:
    """The part of one parameter that is in this rank's shard."""

    index: int  # the parameter's position in its bucket
    # start, stop: range in the flattened parameter
    start: int
    stop: int
    offset: int  # start of the piece in the shard
    parameter: nn.Parameter  # the tensor that the optimizer updates; fp32 if there are master weights

    def view(self, shard: Tensor) -> Tensor:
        """Return the piece's range of a flat tensor over the shard."""
        return shard[self.offset : self.offset + self.stop - self.start]


def places_in_bucket(sizes: Sequence[int], num_shards: int, whole_parameters: bool) -> tuple[list[int], int]:
    """Return the offset of each parameter in the flat buffer, and the buffer's size, divisible by `num_shards`."""
    if not whole_parameters or num_shards == 1:
        padded = [pad_to_multiple(size, _ALIGNMENT) for size in sizes]
        offsets = [sum(padded[:index]) for index in range(len(sizes))]
        return offsets, pad_to_multiple(sum(padded), num_shards * _ALIGNMENT)
    # Whole parameters are distributed, the largest first to the emptiest shard; shards are padded to the fullest.
    loads, places = [0] * num_shards, [(0, 0)] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        shard = loads.index(min(loads))
        places[index] = (shard, loads[shard])
        loads[shard] += pad_to_multiple(sizes[index], _ALIGNMENT)
    shard_size = pad_to_multiple(max(loads), _ALIGNMENT)
    return [shard * shard_size + start for shard, start in places], shard_size * num_shards


def move_into(flat: Tensor, params: Sequence[nn.Parameter], offsets: Sequence[int]) -> None:
    """Move the values of parameters into flat memory, of which the parameters become views."""
    for param, offset in zip(params, offsets, strict=True):
        view = flat[offset : offset + param.numel()].view(param.shape)
        view.copy_(param.data)
        param.data = view


def gaps_between(offsets: Sequence[int], sizes: Sequence[int], total: int) -> list[tuple[int, int]]:
    """Return the ranges of a flat buffer that belong to no parameter."""
    gaps, end = [], 0
    for offset, size in sorted(zip(offsets, sizes, strict=True)):
        if offset > end:
            gaps.append((end, offset))
        end = offset + size
    return gaps if end == total else [*gaps, (end, total)]


_ALONE = 2**20  # elements from which a sum by itself takes longer on a GPU than its launch


def add_together(sums: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Add gradients of a GPU to their sums, small ones by two kernels: one for all takes no two dtypes."""
    small = [(total, grad) for total, grad in zip(sums, grads, strict=True) if grad.numel() < _ALONE]
    for total, grad in zip(sums, grads, strict=True):
        if grad.numel() >= _ALONE:
            total.add_(grad)
    if small:
        sums, grads = zip(*small, strict=True)
        wide = grads if grads[0].dtype == sums[0].dtype else [torch.empty_like(total) for total in sums]
        if wide is not grads:
            torch._foreach_copy_(wide, grads)
        torch._foreach_add_(sums, wide)


Source = Callable[[], Tensor]  # returns the values of a parameter, in the precision that an optimizer needs


def take_source(param: nn.Parameter, initial: dict[nn.Parameter, Source]) -> Source:
    """Remove the source of a parameter's values and return it; without one, that of the values that it has."""
    values = param.data
    return initial.pop(param, lambda: values)


def without_values(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of one element in memory, repeated: nan, so that code that reads it too early is noticed."""
    return torch.full((1,), math.nan, dtype=dtype, device=device).expand(*shape)


_AT_ONCE = 2**25  # elements that are compared at a time: temporary memory is 7 bytes for each


class OptimizerShard:
    """Values of this rank's shard, as the optimizer updates them.

    Args:
        parameters: [shard], the shard's range of the parameters' memory.
        dtype: dtype of the values; if it is not that of the parameters, the values are master weights.

    Attributes:
        values: [shard].
        may_differ: whether other code may have changed the parameters since `write_parameters`.
    """

    def __init__(self, parameters: Tensor, dtype: torch.dtype, start: int, memory: StateMemory) -> None:
        self._parameters, self._start = parameters, start
        self.is_master = dtype != parameters.dtype
        self._is_copy = self.is_master or (memory.is_offloaded and parameters.device.type != "cpu")
        # Zeros between parameters, as in the bucket.
        self.values = memory.empty(len(parameters), dtype, parameters.device).zero_() if self._is_copy else parameters
        self.pieces: list[BucketSlice] = []
        self.may_differ = True

    def add_pieces(self, params: Sequence[nn.Parameter], offsets: Sequence[int], sources: Sequence[Source]) -> None:
        """Make the pieces of parameters at `offsets` of the bucket; sources outside of the shard are not asked."""
        for index, (param, offset) in enumerate(zip(params, offsets, strict=True)):
            start = max(0, self._start - offset)
            stop = min(param.numel(), self._start + len(self.values) - offset)
            if start >= stop:
                continue
            place = offset + start - self._start
            view = self.values[place : place + stop - start]
            view.copy_(sources[index]().reshape(-1)[start:stop])
            whole = stop - start == param.numel()
            parameter = parameter_like(param, view.view_as(param) if whole else view).requires_grad_(True)
            self.pieces.append(BucketSlice(index, start, stop, place, parameter))

    def unchanged(self) -> Tensor | None:
        """Return on the GPU whether parameters are the rounded values (0-d bool); None where the host waits."""
        if not self._is_copy or self._parameters.device.type == "cpu" or self.values.device != self._parameters.device:
            return None
        parts = zip(self.values.split(_AT_ONCE), self._parameters.split(_AT_ONCE), strict=True)
        same = [(own.to(present.dtype) == present).all() for own, present in parts]
        return same[0] if len(same) == 1 else torch.stack(same).all()

    def take_changed_parameters(self) -> None:
        """Take over parameters changed since `write_parameters`; masters of those still rounded stay."""
        self._take_pieces_back()
        may_differ, self.may_differ = self.may_differ, True
        if not self._is_copy or not may_differ:
            return
        for own, present in zip(self.values.split(_AT_ONCE), self._parameters.split(_AT_ONCE), strict=True):
            master = own.to(present.device)
            rounded = master.to(present.dtype)
            # No comparison on a GPU: it would have to synchronize with the device, as a copy from the host does anyway.
            if (present.device.type != "cpu" and master is own) or not torch.equal(rounded, present):
                torch.where(rounded == present, master, present.to(master.dtype), out=master)
                if master is not own:
                    own.copy_(master)

    def write_parameters(self) -> None:
        """Write updated values to the shard of the parameters."""
        self._take_pieces_back()
        if self._is_copy:
            self._parameters.copy_(self.values, non_blocking=True)

    def read_parameters(self) -> None:
        """Take the parameters' values for master weights."""
        self._take_pieces_back()
        if self._is_copy:
            self.values.copy_(self._parameters)

    def _take_pieces_back(self) -> None:
        """Move pieces whose `data` was replaced by their optimizer back into `values`, in shape and dtype."""
        start, size = self.values.data_ptr(), self.values.element_size()
        for piece in self.pieces:
            if piece.parameter.data_ptr() != start + piece.offset * size:
                take_back(piece.parameter, piece.view(self.values))


def take_back(param: nn.Parameter, place: Tensor) -> None:
    """Move a parameter whose `data` was replaced back to its place in flat memory."""
    if param.dtype != place.dtype or param.numel() != place.numel():
        raise ConfigurationError(
            f"a parameter became a {tuple(param.shape)} of {param.dtype} after boost(), where its optimizer knows "
            f"{place.numel()} values of {place.dtype}; change shapes and dtypes before boost()"
        )
    place.copy_(param.data.reshape(-1))
    param.data = place.view(param.shape)


def look_at(norm: Tensor, shards: Sequence[OptimizerShard]) -> bool:
    """Return whether a norm is finite; the same wait for a GPU tells which shards need not be compared again.

    Call it right before `take_changed_parameters`: what is changed in between is not seen.
    """
    asked = [(shard, same) for shard in shards if (same := shard.unchanged()) is not None]
    is_finite = norm < math.inf  # False for nan, too
    flags = [same for _, same in asked]
    finite, *unchanged = torch.stack([is_finite.to(flags[0].device) if flags else is_finite, *flags]).tolist()
    for (shard, _), is_same in zip(asked, unchanged, strict=True):
        shard.may_differ = not is_same or not finite  # a step that is skipped takes nothing
    return finite


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several pipeline stages hold."""

    order: int  # position among the tied parameters, the same on all ranks
    group: ProcessGroup  # the stages' ranks, over which its gradient is summed
    counted: bool  # whether the global norm counts this rank's copy


NATIVE_GRAD = torch._C.TensorBase.grad  # where autograd leaves the gradient of one pass
_NATIVE_DATA = torch._C.TensorBase.data


class BucketParameter(nn.Parameter):
    """A parameter of a bucket; copies of it are ordinary parameters."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient that the optimizer will use; ConfigurationError if this rank does not have all of it."""
        own, place = NATIVE_GRAD.__get__(self), _place_of(self)
        if own is not None or place is None or torch.compiler.is_compiling():
            return own
        bucket, index = place
        if not bucket.has_grad(index):
            return None
        _check_visible(bucket, index)
        return bucket.reduced_grad(index)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        place = _place_of(self)
        if place is None:
            NATIVE_GRAD.__set__(self, value)
            return
        NATIVE_GRAD.__set__(self, None)
        bucket, index = place
        if value is None:
            bucket.forget_grad(index)
        else:
            _check_visible(bucket, index)
            bucket.set_grad(index, value)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Register a hook on the gradient; refused in a bucket, whose gradient arrives in parts."""
        _check_hook(self, "register_hook")
        return super().register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Register a hook after the gradient; refused in a bucket, whose gradient arrives in parts."""
        _check_hook(self, "register_post_accumulate_grad_hook")
        return super().register_post_accumulate_grad_hook(hook)

    @property
    def data(self) -> Tensor:
        """The values after the last step; reading them waits until they are gathered."""
        place = _place_of(self)
        if place is not None:
            place[0].arrive()
        return _NATIVE_DATA.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        _NATIVE_DATA.__set__(self, value)


# What may be asked of a parameter without its values: properties by name, methods by name.
_READ_VALUES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
_WITHOUT_VALUES = frozenset(
    ("size", "dim", "numel", "nelement", "ndimension", "element_size", "stride", "storage_offset", "is_contiguous")
    + ("is_floating_point", "is_complex", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook")
    + ("get_device", "is_same_size", "retain_grad", "untyped_storage", "__len__", "__hash__", "zero_grad", "_is_view")
)


class ReleasedParameter(BucketParameter):
    """A parameter of ZeRO stage 3 whose values this rank does not have at present."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Have the values gathered before an operation that reads them."""
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__", "__delete__"):
            name = getattr(func.__self__, "__name__", name)
            reads = name in _READ_VALUES
        else:
            reads = name not in _WITHOUT_VALUES
        if reads:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, ReleasedParameter):
                    value.shard_owner.demand(name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:
        return f"Parameter of shape {tuple(self.shape)} and {self.dtype}, sharded by zero_stage=3"


def hide_values(param: nn.Parameter, owner: ShardedParameters) -> None:
    """Have every operation that reads the values ask `owner` for them first."""
    param.shard_owner, param.shown_class = owner, type(param)
    param.__class__ = ReleasedParameter


def show_values(param: nn.Parameter) -> None:
    """Undo `hide_values`."""
    param.__class__ = param.shown_class


def give_gradient(param: nn.Parameter, grad: Tensor) -> bool:
    """Add the gradient of one use of a parameter to its bucket; return whether it has one."""
    place = _place_of(param)
    if place is not None:
        bucket, index = place
        bucket.accumulate(index, grad)
    return place is not None


def show_grad(param: nn.Parameter, bucket: Bucket, index: int) -> None:
    """Make `param.grad` read the gradient from the bucket."""
    if type(param) is nn.Parameter:
        param.__class__ = BucketParameter
    param.bucket_place = weakref.ref(bucket), index


def _place_of(param: nn.Parameter) -> tuple[Bucket, int] | None:
    """Return the bucket and the index in it, which the parameter references weakly."""
    reference, index = param.__dict__.get("bucket_place", (None, 0))
    bucket = None if reference is None else reference()
    return None if bucket is None else (bucket, index)


def _check_hook(param: nn.Parameter, method: str) -> None:
    if _place_of(param) is not None:
        raise ConfigurationError(
            f"{method} after boost() would run the hook on each micro-batch's and each rank's part of the gradient; "
            "call register_hook before boost(), which then runs it on the whole gradient, or read "
            "optimizer.full_gradients()"
        )


def _check_visible(bucket: Bucket, index: int) -> None:
    reason = bucket.options.hidden_by
    if reason is None and index in bucket.written:
        reason = "no_sync"
    if reason is not None:
        raise ConfigurationError(
            f"param.grad cannot be read or set under {reason}, where no rank has the gradient as plain torch would; "
            "instead of torch.nn.utils.clip_grad_norm_ use HybridParallelPlugin(max_norm=…) or "
            "model.clip_grad_norm_(max_norm), of clip_grad_value_ optimizer.clip_grad_value_(value), for zeros "
            "optimizer.zero_grad(), to look optimizer.full_gradients()"
        )
