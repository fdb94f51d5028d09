"""Dispatch modes that log operations on tensors without values instead of running them.

A program sees the same as without the modes: tensors report that they are on the CPU, and a program that asks for a
value (`item()`, a comparison in an `if`, `tolist()`) gets it, by replaying the few steps that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardformer.lazy.init_log import InitLog, StorageView

_aten = torch.ops.aten
_OVERWRITING = {
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.zero_.default,
    _aten.copy_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
    _aten.exponential_.default,
    _aten.log_normal_.default,
    _aten.bernoulli_.float,
}
_UNSET = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_SEED = 0  # for values read while the model is built, when no other seed is known


class DispatchRecorder(TorchDispatchMode):
    """Logs every operation that makes or changes a tensor."""

    def __init__(self, log: InitLog) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # here tensors report their real device
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is _aten.lift_fresh.default:
            return self._constant(args[0])
        if any(map(self.log.knows, inputs)):
            return self._record_known(func, args, kwargs, inputs)
        if inputs or not _takes(func, "device") or kwargs.get("generator") is not None:
            return func(*args, **kwargs)  # depends on real values only, such as a numpy table
        return self._record(func, args, kwargs, inputs)

    def overwrite(self, function: Callable[..., Any], tensor: Tensor, *args: Any) -> None:
        """Log a function that overwrites all of `tensor` with random values."""
        place = StorageView.of(tensor)
        overwrites = place.storage if place.is_whole else None
        self.log.add(
            function, (place, *args), {}, results=(), writes=[place.storage], overwrites=overwrites, draws=True
        )

    def constant(self, make: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Return a tensor without values whose values `make` returns; `like` has its shape and dtype."""
        made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
        self.log.add(make, (), {}, results=[(0, StorageView.of(made))], writes=[made.untyped_storage()])
        return made

    def value_of(self, tensor: Tensor) -> Tensor:
        """Return the values of a logged tensor; return any other tensor unchanged."""
        return self.log.values([StorageView.of(tensor)], _SEED)[0] if self.log.knows(tensor) else tensor

    def _constant(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor  # created on the meta device by user code
        values = tensor.detach().clone()
        return self.constant(values.clone, values)

    def _record_known(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        if _is_view(func):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if any(not tensor.is_meta for tensor in written) or not _returns_tensors(func):
            return func(*tree_map_only(Tensor, self.value_of, args), **tree_map_only(Tensor, self.value_of, kwargs))
        try:
            return self._record(func, args, kwargs, inputs)
        except (NotImplementedError, RuntimeError):
            # The output shape depends on values (nonzero), or the operator has no meta kernel.
            if written:
                raise
            values = [tree_map_only(Tensor, self.value_of, each) for each in (args, kwargs)]
            return tree_map_only(Tensor, self._constant, func(*values[0], **values[1]))

    def _record(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        if "generator" in kwargs:
            kwargs["generator"] = None  # a generator's draws would depend on the order of draws
        if _takes(func, "device"):
            kwargs["device"] = torch.device("meta")
            kwargs.pop("pin_memory", None)
        places = {id(tensor): StorageView.of(tensor) if tensor.is_meta else tensor.clone() for tensor in inputs}
        before = [tensor.untyped_storage() for tensor in inputs]
        written = _written(func, args, kwargs)
        returned = func(*_without_values(args), **_without_values(kwargs))
        fresh = [
            (position, StorageView.of(tensor))
            for position, tensor in enumerate(tree_leaves(returned))
            if isinstance(tensor, Tensor) and all(tensor.untyped_storage() is not storage for storage in before)
        ]
        if not inputs and _takes(func, "dtype") and len(fresh) == 1:
            kwargs["dtype"] = fresh[0][1].dtype  # the default dtype may differ at replay
        self._log(func, args, kwargs, places, fresh, written)
        return returned

    def _log(self, func: Any, args: Any, kwargs: Any, places: Any, fresh: Any, written: list[Tensor]) -> None:
        writes = [place.storage for _, place in fresh] + [tensor.untyped_storage() for tensor in written]
        if not writes:
            return
        whole = func in _OVERWRITING and places[id(args[0])].is_whole
        source_is_other = all(each is not args[0].untyped_storage() for each in _sources(args)) if whole else False
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        logged_args, logged_kwargs = tree_map_only(Tensor, lambda tensor: places[id(tensor)], (args, kwargs))
        self.log.add(
            _zeros_for(func) if func in _UNSET else func,
            logged_args,
            logged_kwargs,
            results=fresh,
            writes=writes,
            overwrites=writes[0] if whole and source_is_other else None,
            draws=torch.Tag.nondeterministic_seeded in func.tags,
        )


class FunctionRecorder(TorchFunctionMode):
    """Answers queries of tensors that are not operations, such as `device` and `tolist`."""

    def __init__(self, recorder: DispatchRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUESTIONS and self.recorder.log.knows(args[0]):
            return _QUESTIONS[func](self.recorder, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _of_values(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda recorder, tensor, *args, **kwargs: method(recorder.value_of(tensor), *args, **kwargs)


# Property getters and methods that are not operations: function -> answer.
_QUESTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.device.__get__: lambda recorder, tensor: torch.device("cpu"),
    Tensor.is_meta.__get__: lambda recorder, tensor: False,
    Tensor.is_cpu.__get__: lambda recorder, tensor: True,
    Tensor.tolist: _of_values(Tensor.tolist),
    Tensor.numpy: _of_values(Tensor.numpy),
    Tensor.__array__: _of_values(Tensor.__array__),
}


def _zeros_for(func: Any) -> Callable[..., Tensor]:
    """Return `func` followed by zeroing: uninitialized memory becomes 0, so that it is the same everywhere."""
    return lambda *args, **kwargs: func(*args, **kwargs).zero_()


def _without_values(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor if tensor.is_meta else tensor.to("meta"), tree)


def _sources(args: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(args[1:]) if isinstance(leaf, Tensor)]


def _takes(func: Any, name: str) -> bool:
    return any(argument.name == name for argument in func._schema.arguments)


def _returns_tensors(func: Any) -> bool:
    returns = func._schema.returns
    return not returns or any("Tensor" in str(each.type) for each in returns)


def _is_view(func: Any) -> bool:
    infos = [each.alias_info for each in func._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operation changes."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return written
