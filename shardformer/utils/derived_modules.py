"""Modules that work differently: objects of a derived class that replace native modules and share their state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

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


_HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
_HOOK_OPTIONS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
)
_OURS = ("shardformer.", "plugins.")
_LIBRARIES = ("torch.nn.modules.", "transformers.", "bitsandbytes.nn.modules", *_OURS)
_PACKED = ("Params4bit", "Int8Params")
_PLAIN_PRODUCTS = ("FalconLinear",)  # linear layers of transformers whose own forward is that of `nn.Linear`


def is_quantised(parameter: Tensor | None) -> bool:
    """Return whether a parameter is quantised: packed, or stored in few bits together with scales."""
    if not isinstance(parameter, nn.Parameter):
        return False
    if any(cls.__name__ in _PACKED and cls.__module__.startswith("bitsandbytes.") for cls in type(parameter).__mro__):
        return True
    return parameter.dtype in (torch.uint8, torch.int8) or type(parameter).__module__.startswith("torchao.")


def hook_on(module: nn.Module) -> str | None:
    """Return the kind of a hook that a user has registered on the module; None if there is none.

    Hooks of transformers (noise on embeddings, inputs that need gradients) and of this package do not count.
    """
    for name, words in _HOOKS.items():
        if any(not _module_of(hook).startswith(("transformers.", *_OURS)) for hook in getattr(module, name).values()):
            return words
    return None


def user_code(module: nn.Module) -> str | None:
    """Describe what replacing the module by a layer of another class would lose; None if nothing."""
    if parametrize.is_parametrized(module):
        return f"a parametrization of its {', '.join(module.parametrizations)}"
    if (hook := hook_on(module)) is not None:
        return hook
    forward = vars(module).get("forward")
    if forward is not None and not _module_of(forward).startswith(_OURS):
        return "a forward of its own"
    definer = next(cls for cls in type(module).__mro__ if "forward" in vars(cls) or "__call__" in vars(cls))
    if not definer.__module__.startswith(_LIBRARIES) or _multiplies_otherwise(definer):
        return f"the forward of {definer.__name__}"
    if type(module).__module__.startswith("torch.nn.modules."):
        usual = {"weight", "bias"}
        added = [*(name for name in module._parameters if name not in usual), *module._buffers, *module._modules]
        if added:
            return f"{added[0]}, which was added to it"
    own = [each for each in module._parameters.values() if each is not None and not is_quantised(each)]
    kinds = {type(parameter) for parameter in own}
    if kinds - {nn.Parameter}:
        return f"weights of the kind {min(kind.__name__ for kind in kinds - {nn.Parameter})}"
    return None


def _multiplies_otherwise(definer: type[nn.Module]) -> bool:
    """Return whether a class of transformers is a linear layer whose forward is another one, as of scaled logits."""
    is_theirs = issubclass(definer, nn.Linear) and definer.__module__.startswith("transformers.")
    return is_theirs and definer.__name__ not in _PLAIN_PRODUCTS


def stored_weight(module: nn.Module | None) -> Tensor | None:
    """Return the weight of a module; None if it has none, or a parametrization computes it.

    To read a parametrized weight may change it: spectral norm takes a step of its power iteration.
    """
    return None if parametrize.is_parametrized(module, "weight") else getattr(module, "weight", None)


def carry_over(native: nn.Module, new: nn.Module) -> None:
    """Give a module that replaces `native` the mode, hooks and attributes of `native`."""
    new.train(native.training)
    for name in (*_HOOKS, *_HOOK_OPTIONS):
        setattr(new, name, getattr(native, name))  # the same dict object: handles that remove hooks refer to it
    for name, value in vars(native).items():
        if not name.startswith("_") and not hasattr(new, name):
            setattr(new, name, value)


def hooked_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, module and kind of hook for the modules that a user has registered hooks on."""
    return ((path, module, hook) for path, module in model.named_modules() if (hook := hook_on(module)) is not None)


def _module_of(function: Callable[..., Any]) -> str:
    """Return the module that defines a function, method, partial or callable object."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__
