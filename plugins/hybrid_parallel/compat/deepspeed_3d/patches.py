"""Implement `custom_patcher`: user functions that wrap the forward of selected modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from booster.errors import ConfigurationError
from shardformer.stages.stage import StagePlaceholder
from shardformer.utils.module_paths import ends_in, has_module, nearest_names

# (the module's forward, the module) -> its new forward
Patch = Callable[[Callable[..., Any], nn.Module], Callable[..., Any]]


def find_patched(model: nn.Module, patcher: Mapping[str, Patch]) -> dict[nn.Module, list[Patch]]:
    """Find the modules that `patcher` names.

    Args:
        model: the whole model.
        patcher: path of a module or the end of a path, in which `*` stands for any number -> patch. A full path selects
            only that module.

    Returns:
        module -> its patches, innermost first.

    Raises:
        ConfigurationError: a name matches no module; the message suggests the nearest names.
    """
    modules = {path: module for path, module in model.named_modules() if path}
    found: dict[nn.Module, list[Patch]] = {}
    problems = []
    for name, patch in patcher.items():
        paths = [name] if name in modules else [path for path in modules if ends_in(path, name)]
        if not paths:
            problems.append(
                f"custom_patcher names '{name}', which matches no module of {type(model).__name__}; use one of "
                f"{nearest_names(name, modules)}, or * for the number of a layer"
            )
        for path in paths:
            found.setdefault(modules[path], []).append(patch)
    if problems:
        raise ConfigurationError("; ".join(problems))
    return found


class ForwardPatches:
    """Forward patches of a model that is about to be sharded.

    A module that sharding replaces by a sharded version, or whose forward it replaces, is patched again afterwards. The
    patch then gets the sharded module and its forward.

    Args:
        model: the whole model.
        patched: module -> its patches.
    """

    def __init__(self, model: nn.Module, patched: Mapping[nn.Module, list[Patch]]) -> None:
        # Store paths instead of modules, so that replaced modules can be freed.
        self._patches = {path: patched[module] for path, module in model.named_modules() if module in patched}

    def apply(self, model: nn.Module) -> None:
        """Patch every module that is on this rank and not patched yet.

        Raises:
            ConfigurationError: a patch did not return a function.
        """
        for path, patches in self._patches.items():
            if not has_module(model, path) or isinstance(module := model.get_submodule(path), StagePlaceholder):
                continue  # the module runs on another stage
            present = vars(module).get("forward")
            if getattr(present, "patched_module", None) is module:
                continue
            if hasattr(present, "patched_module"):  # the sharded module is a copy of the patched one
                del module.forward
            module.forward = _patched(path, module, patches)

    def remove(self, model: nn.Module) -> None:
        """Remove the patches, after the model turned out not to be shardable as requested."""
        for path in self._patches:
            module = model.get_submodule(path) if has_module(model, path) else None
            present = vars(module).get("forward") if module is not None else None
            if hasattr(present, "native_in_dict"):
                del module.forward
                if present.native_in_dict is not None:
                    module.forward = present.native_in_dict


def _patched(path: str, module: nn.Module, patches: list[Patch]) -> Callable[..., Any]:
    native = module.forward
    new = native
    for patch in patches:
        new = patch(new, module)
        if not callable(new):
            raise ConfigurationError(
                f"custom_patcher: the patch of {path} returned a {type(new).__name__}; return the new forward"
            )

    @functools.wraps(native)  # stages match the inputs of a layer by parameter name
    def forward(*args: Any, **kwargs: Any) -> Any:
        return new(*args, **kwargs)

    forward.__module__ = __name__  # marks it as a patch, not a user's own forward: it will wrap the sharded one
    forward.patched_module, forward.native_in_dict = module, vars(module).get("forward")
    return forward
