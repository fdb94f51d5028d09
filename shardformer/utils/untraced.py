"""Functions that `torch.compile` never traces: it calls them between its graphs, or once, while it traces."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

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
