"""Functions that `torch.compile` never traces: it calls them between its graphs, or once, while it traces.

Changes of a module that keep its identity: the only places where a module gets another class.

Elsewhere a layer that works differently is replaced (`derived_modules.py`). The modules here are the user's: the model
that was handed in, or a customized layer that the user's own code may call by a reference that no replacement reaches.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

_UNTRACED: list[Any] = []
_CONSTANT: list[Callable[..., Any]] = []


def untraced(function: Callable[..., Any]) -> Any:
    """Keep a function out of the graphs of compiled layers: it communicates, or writes to memory that they do not know.

    A traced collective would be replaced by another one, and a gradient buffer would be written while it is traced.
    `torch.compiler.disable` imports the compiler, which takes longer than this package; `prepare_tracing` calls it.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call.between_graphs(*args, **kwargs)
        return function(*args, **kwargs)

    call.between_graphs = function
    _UNTRACED.append(call)
    return call


def constant_in_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have `torch.compile` call a function of constants while it traces, and take what it returns for a constant."""
    _CONSTANT.append(function)
    return function


def prepare_tracing() -> None:
    """Import the compiler, and exclude the functions that `untraced` has marked; call this before anything compiles."""
    for call in _UNTRACED:
        if call.between_graphs is call.__wrapped__:  # another object would make graphs that call it invalid
            call.between_graphs = torch.compiler.disable(call.__wrapped__)
    for function in _CONSTANT:
        torch.compiler.assume_constant_result(function)


def is_compiler_loaded() -> bool:
    """Return whether something has imported the compiler, as most models of transformers do."""
    return "torch._dynamo" in sys.modules


def current_pass() -> int:
    """Return the number of the backward pass that autograd runs on this thread; -1 for none."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Return whether autograd runs a backward pass on this thread."""
    return current_pass() != -1


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
