"""Module paths: matching of names, suggestions, descriptions for messages, and the modules that they name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn


def ends_in(path: str, name: str) -> bool:
    """Return whether `path` ends in the dotted parts of `name`; a part `*` matches any number."""
    parts, wanted = path.split("."), name.lstrip(".").split(".")
    if wanted == [""] or len(wanted) > len(parts):
        return False
    found = parts[len(parts) - len(wanted) :]
    return all(part == want or (want == "*" and part.isdecimal()) for part, want in zip(found, wanted, strict=True))


def in_order(paths: Iterable[str]) -> list[str]:
    """Return paths in the order of their layers: `layers.2` before `layers.10`."""
    return sorted(paths, key=lambda path: [(part.zfill(9) if part.isdecimal() else part) for part in path.split(".")])


def nearest_names(name: str, paths: Iterable[str]) -> list[str]:
    """Return the ends of paths that are most similar to `name`, the nearest first."""
    return difflib.get_close_matches(name.lstrip("."), _endings(paths), n=3, cutoff=0.0)


def _endings(paths: Iterable[str]) -> list[str]:
    """Return the last part of each path, and the last two."""
    return sorted({".".join(path.split(".")[-count:]) for path in paths for count in (1, 2)})


def starred(path: str) -> str:
    """Return `path` with `*` instead of numbers, as plans name a module of every layer."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def join(path: str, name: str) -> str:
    """Return the path of `name` in the module at `path`, which is "" for the model itself."""
    return f"{path}.{name}" if path else name


def path_of(model: nn.Module, module: nn.Module) -> str:
    """Return the path of a module of the model; "" if it is the model itself, or no part of it."""
    return next((name for name, other in model.named_modules() if other is module), "")


def told(model: nn.Module, paths: Iterable[str]) -> str:
    """Describe modules of a model, several layers as one: "layers.*.norm (a LayerNorm), head (a Linear)"."""
    alike: dict[str, list[str]] = {}
    for path in paths:
        alike.setdefault(starred(path), []).append(path)
    return ", ".join(
        f"{same[0] if len(same) == 1 else path} (a {type(model.get_submodule(same[0])).__name__})"
        for path, same in alike.items()
    )


def replace_module(root: nn.Module, path: str, new: nn.Module) -> None:
    """Replace the module at `path` by `new`."""
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, new)


def has_module(root: nn.Module, path: str) -> bool:
    """Return whether `path` names a module below `root`; an attribute that is None (no pooler) does not count."""
    module: nn.Module | None = root
    for name in path.split(".") if path else ():
        module = None if module is None else module._modules.get(name)
    return module is not None


def names_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """Return id of each parameter -> its names, several if it is tied, in the model's order."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def alias_groups(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter, in the model's order."""
    return list(names_of_parameters(model).values())


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return groups of names that refer to one parameter, in the model's order."""
    return [names for names in alias_groups(model) if len(names) > 1]


def retie(model: nn.Module, tied: list[list[str]]) -> None:
    """Tie the names of each group again after replacements; a sharded parameter takes precedence."""
    for names in tied:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        held = [name for name in names if name in parameters]
        if not held:
            continue
        sharded = [name for name in held if getattr(parameters[name], "shard_spec", None) is not None]
        keep = parameters[(sharded or held)[0]]
        for name in held:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, keep)


Aliases = Callable[[nn.Module, tuple[Any, ...]], Mapping[str, Tensor]]


def alias_parameters(module: nn.Module, aliases_of: Aliases, during: nn.Module | None = None) -> None:
    """Let the forward of `module` read other tensors than its own parameters.

    Args:
        aliases_of: (module, all inputs of a call) -> the tensors of this call, by paths of parameters in the module;
            nothing for a call that reads the parameters.
        during: the module that reads the parameters of `module` in its own forward; None for `module` itself.
    """
    _alias(module, "_parameters", aliases_of, during or module)


def alias_buffers(module: nn.Module, aliases_of: Aliases) -> None:
    """Let the forward of `module` read other tensors than its own buffers, see `alias_parameters`."""
    _alias(module, "_buffers", aliases_of, module)


def _alias(module: nn.Module, kind: str, aliases_of: Aliases, during: nn.Module) -> None:
    calls: list[dict[str, Tensor | None]] = []  # the tensors themselves, by nested calls

    def exchange(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        native = {}
        for path, tensor in tensors.items():
            owner, _, name = path.rpartition(".")
            held = getattr(module.get_submodule(owner), kind)
            native[path], held[name] = held[name], tensor
        return native

    def enter(_: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        calls.append(exchange(aliases_of(module, (*args, *kwargs.values()))))

    def leave(*_: Any) -> None:
        exchange(calls.pop())

    during.register_forward_pre_hook(enter, with_kwargs=True)
    during.register_forward_hook(leave, always_call=True)
