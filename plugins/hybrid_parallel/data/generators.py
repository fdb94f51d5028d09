"""Search for the torch generators that a user's function or object holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_DEPTH = 5
_MANY = 64  # containers with more entries are treated as data and not searched
_METHODS = ("__call__", "__getitem__", "__iter__")


def generators_of(*owners: Any) -> list[torch.Generator]:
    """Return generators in closures, arguments, attributes and globals, at most five references away, each once."""
    found: dict[int, torch.Generator] = {}
    seen: set[int] = set()
    level = list(owners)
    for _ in range(_DEPTH):
        found |= {id(each): each for each in level if isinstance(each, torch.Generator)}
        seen |= {id(each) for each in level}
        level = [part for each in level for part in _parts(each) if id(part) not in seen]
    return list(found.values())


def _parts(owner: Any) -> Iterator[Any]:
    """Yield the objects that `owner` refers to."""
    if owner is None or isinstance(owner, str | bytes | int | float | Tensor | nn.Module | ModuleType | type):
        return
    if isinstance(owner, Mapping | list | tuple):
        values = owner.values() if isinstance(owner, Mapping) else owner
        yield from values if len(owner) <= _MANY else ()
    elif isinstance(owner, FunctionType):
        yield from _of_function(owner)
    elif isinstance(owner, MethodType):
        yield from (owner.__self__, owner.__func__)
    elif isinstance(owner, partial):
        yield from (owner.func, *owner.args, *owner.keywords.values())
    elif hasattr(owner, "__dict__"):
        yield from vars(owner).values()
        yield from (getattr(type(owner), name, None) for name in _METHODS)


def _of_function(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is not bound yet
            continue
    yield from (function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__)
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function reads, including those in nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
