"""Wrapper around the calls of a module, outside of all of its hooks, including those registered later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

# (the module's own call, args, kwargs) -> what the caller gets
OuterCall = Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]


def call_through(module: nn.Module, outer: OuterCall) -> None:
    """Route every call of `module` through `outer`, by a derived class: Python looks up `__call__` on the class."""
    native = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return outer(partial(native.__call__, self), args, kwargs)

    module.__class__ = type(native.__name__, (native,), {"__call__": call, "__module__": native.__module__})
