"""Changes of a module that keep its identity: the only places where a module gets another class.

Elsewhere a layer that works differently is replaced (`derived_modules.py`). The modules here are the user's: the model
that was handed in, or a customized layer that the user's own code may call by a reference that no replacement reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

# (the module's own call, args, kwargs) -> what the caller gets
OuterCall = Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]


def call_through(module: nn.Module, outer: OuterCall) -> None:
    """Route every call of `module` through `outer`, outside of all of its hooks, including those registered later.

    Python looks up `__call__` on the class, so this needs a derived class.
    """
    native = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return outer(partial(native.__call__, self), args, kwargs)

    set_class(module, type(native.__name__, (native,), {"__call__": call, "__module__": native.__module__}))


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give `module` the methods of another class."""
    module.__class__ = cls
