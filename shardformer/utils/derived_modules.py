"""Modules that work differently: objects of a derived class that replace native modules and share their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, reduce
from typing import Any

from torch import nn

from shardformer.utils.untraced import set_class

# Changes a module in place; may return an object of a derived class that replaces it.
ModuleChange = Callable[[nn.Module], nn.Module | None]


def derive(module: nn.Module, methods: type[nn.Module]) -> nn.Module:
    """Return a module that has the methods of `methods` before its own, and the state of `module`.

    Both objects have one `__dict__`: parameters, buffers, sub-modules, hooks and plain attributes are the same, also
    if they change later through a reference to `module` that a user has kept.

    Args:
        methods: class without state of its own; its `super()` is the class of `module`.
    """
    return with_class(module, derived_class(type(module), methods))


def with_class(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """Return an object of the class `cls` that shares the state of `module`."""
    new = cls.__new__(cls)
    object.__setattr__(new, "__dict__", vars(module))
    return new


@cache  # one class for all layers of a kind, so that compiled code serves all of them
def derived_class(native: type[nn.Module], methods: type[nn.Module]) -> type[nn.Module]:
    """Return a class with the methods of `methods` before those of `native`, under the name of `native`."""
    if issubclass(methods, native):
        return methods
    # The module's name tells whose code it is; attention is found by it.
    own = {"__module__": native.__module__, "__doc__": native.__doc__, "__reduce__": _reduce}
    return type(native.__name__, (methods, native), own)


def change_module(model: nn.Module, module: nn.Module, change: ModuleChange) -> nn.Module:
    """Apply `change` to a module of `model`; return the module, or what has replaced it."""
    new = change(module)
    if not isinstance(new, type(module)) or new is module:  # a user's function may return anything
        return module
    replace_modules(model, {module: new})
    return new


def replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules of `model` under each name that they have.

    Args:
        model: keeps its identity, because its owner holds it; if it is among the modules, it gets the new class.
        replacements: module -> object that shares its state (`derive`, `with_class`).
    """
    if model in replacements:
        set_class(model, type(replacements[model]))
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]


def _reduce(module: nn.Module) -> tuple[Any, ...]:
    # Pickles cannot find a derived class by its name, only the classes that it is made of.
    native, added = type(module), []
    while vars(native).get("__reduce__") is _reduce:
        methods, native = native.__bases__
        added.append(methods)
    # As in `nn.Module.__getstate__`: the compiled call of a layer would run the original in a copy.
    state = {name: value for name, value in vars(module).items() if name != "_compiled_call_impl"}
    return _make, (native, *reversed(added)), state


def _make(native: type[nn.Module], *added: type[nn.Module]) -> nn.Module:
    cls = reduce(derived_class, added, native)
    return cls.__new__(cls)
