"""BucketParameter: a parameter whose `grad` attribute reads its gradient from a bucket.

torch's own tools (`clip_grad_norm_`, `clip_grad_value_`, loops over `param.grad`) take None for "no gradient" and
continue silently. If this rank has the whole gradient, `param.grad` returns it, to read and to write in place.
Otherwise it raises an error that names the equivalent for all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from booster.errors import ConfigurationError

if TYPE_CHECKING:
    from plugins.hybrid_parallel.zero.bucket import Bucket
    from plugins.hybrid_parallel.zero.stage3 import ShardedParameters

_NATIVE = torch._C.TensorBase.grad  # where autograd leaves the gradient of one pass
_NATIVE_DATA = torch._C.TensorBase.data


class BucketParameter(nn.Parameter):
    """A parameter of a bucket; copies of it are ordinary parameters."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient that the optimizer will use; ConfigurationError if this rank does not have all of it."""
        own, place = native_grad(self), _place_of(self)
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
            _NATIVE.__set__(self, value)
            return
        clear_native_grad(self)
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


def native_grad(param: nn.Parameter) -> Tensor | None:
    """Return the gradient that autograd has left since the last `clear_native_grad`."""
    return _NATIVE.__get__(param)


def clear_native_grad(param: nn.Parameter) -> None:
    """Clear the gradient that autograd has left."""
    _NATIVE.__set__(param, None)


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
